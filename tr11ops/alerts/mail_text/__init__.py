"""The text of each mail: of an alert, of the daily summary, to the site; and what they share. Pure."""

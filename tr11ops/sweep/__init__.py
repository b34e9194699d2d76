"""Studies: many runs from one card."""

"""Text to first cause: signatures as data, who is to blame, and the stacks of a hang."""

"""A hub server of the twin, which can be told to fail."""

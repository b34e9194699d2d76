"""Checks that keep a bad node from training, one a file."""

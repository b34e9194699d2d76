"""Optimizers, one a file."""

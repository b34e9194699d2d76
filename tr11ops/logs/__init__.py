"""Readers of a run's logs."""

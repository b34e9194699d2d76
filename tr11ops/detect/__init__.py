"""Detectors: a snapshot in, findings out, pure."""

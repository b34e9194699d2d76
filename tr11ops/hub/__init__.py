"""Logs and models on the hub."""

"""Dumps, traces, and what differs between two states."""

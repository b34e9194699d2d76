"""Stacks of a hang, and who stood out."""

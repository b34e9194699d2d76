"""Sections of the run card, and the rules between them."""

"""Sections of the page, one a file."""

"""Disks, quotas and modes of files."""

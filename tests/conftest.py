"""Fixtures of all tests. The twin (a real Slurm on this machine) is started once, and only when a test asks for it."""

pytest_plugins = ["tests.plugins.twin_fixture"]

"""One keyed screen for the terminal: runs, attempts, nodes, ranks."""

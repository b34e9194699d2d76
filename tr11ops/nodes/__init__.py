"""Which nodes may be used, and the search for a bad one."""

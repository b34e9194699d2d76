"""Who is where, how a parameter is cut, groups and sums."""

"""Live pages over any number of runs, in a browser."""

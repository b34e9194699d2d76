"""One look at scheduler and run directory becomes a snapshot."""

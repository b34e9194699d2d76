"""Months of a training on a simulated cluster, with the decisions of production."""

"""Who is told of what, when, and in which words."""

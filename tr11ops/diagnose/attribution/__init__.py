"""Who is to blame, whether a restart helps, and by which evidence."""

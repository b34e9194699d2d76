"""How each trainer prints a step: one table, and its one reader."""

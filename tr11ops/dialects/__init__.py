"""How each trainer prints a step, and what its words, its checkpoints and its end mean: tables, and their readers."""

"""A worker that behaves like a trainer, and trains nothing."""

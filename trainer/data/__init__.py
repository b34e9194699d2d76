"""Text to micro batches."""

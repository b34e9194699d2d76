"""The layout of the original training, read and written."""

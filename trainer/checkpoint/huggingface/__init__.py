"""Models of Hugging Face, read and written."""

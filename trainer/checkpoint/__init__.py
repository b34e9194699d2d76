"""Checkpoints that any topology reads, and the layouts of DeepSpeed and Hugging Face."""

"""What is wrong with the numbers, and going back."""

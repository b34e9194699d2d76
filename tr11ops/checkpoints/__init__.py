"""What is saved, who needs it, and what may go."""

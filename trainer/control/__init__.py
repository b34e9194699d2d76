"""What a training starts from, when it saves, and every way to end."""

"""Rate, batch ramp, curriculum, FLOPs, memory: what follows from the card, pure."""

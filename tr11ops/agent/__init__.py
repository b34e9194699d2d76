"""What runs inside an allocation: the batch controller, the node agents, and what follows a failed launch."""

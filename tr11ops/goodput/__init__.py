"""Every node-second in one bucket, and advice from that."""

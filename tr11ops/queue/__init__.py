"""What is queued: whose it is, held by whom, repaired, stopped."""

"""Before a job exists: what is seen, checked, planned and submitted."""

"""Verified copies of checkpoints, data and logs: a folder, a bucket, or what fsspec opens."""

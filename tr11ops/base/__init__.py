"""Units, redaction, deadlines, processes, retries and HTTP: what knows nothing of a run."""

"""Every path, record, claim and versioned file of the run directory, and the journal."""

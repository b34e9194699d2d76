"""The run directory's formats, which trainer and operations share."""

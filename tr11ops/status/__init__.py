"""One document of a run, and its forms: screen, JSON, Prometheus, remote."""

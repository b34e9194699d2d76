"""One record a step: log line, JSON, TensorBoard."""

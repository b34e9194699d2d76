"""Text to samples with masked spans: BERT and T5."""

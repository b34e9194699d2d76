"""DeepSpeed, and what of it is changed; stages of several parts."""

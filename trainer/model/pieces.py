"""How much of the logits is held at once, by kind of device. Free of torch: the memory of a card is counted from it."""

from __future__ import annotations

# Logits (in the model's dtype), and of these in fp32 for the soft-max. Sized for caches on the CPU.
PIECE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 28}
SOFTMAX_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}

"""How much of the logits is held at once, by kind of device. Free of torch: the memory of a card is
counted from it.
"""

from __future__ import annotations

# Logits (in the model's dtype), and of these in fp32 for the soft-max. Sized for caches on the CPU.
# On a GPU for as few sums of the weight's gradient as possible: each reads and writes all of it,
# which is as much as 5 GB of logits.
PIECE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 31}
SOFTMAX_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
WIDENED_ELEMENTS = 1 << 17  # widened at a time on a CPU: 512 KiB, which stay in a processor's cache

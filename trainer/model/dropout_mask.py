"""Which attention weights dropout keeps, as a function of a seed and of their place: nothing is kept in memory.

So each kernel that meets a weight, forward and backward, on whichever tensor rank, finds the same answer by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF, WHOLE = 1 << 31, 1 << 32
LOW_16, LOW_17 = 0xFFFF, 0x1FFFF


def _signed(bits: int) -> int:
    """The same 32 bits as the signed number that torch and Triton multiply with."""
    return bits - WHOLE if bits >= HALF else bits


FIRST, SECOND = _signed(0x7FEB352D), _signed(0x846CA68B)  # of Wellons' lowbias32
STRIDE = _signed(0x9E3779B1)  # 2^32 / the golden ratio: neighbours lie far apart


def draw_seed(device: torch.device) -> Tensor:
    """64 random bits as two int32, of the device's generator; no host waits for them."""
    return torch.randint(-HALF, HALF - 1, (2,), dtype=torch.int32, device=device)


def least_kept(dropout: float) -> int:
    """The threshold of `is_kept` for this share of dropped weights, which it meets to 2^-32."""
    return round(dropout * WHOLE) - HALF


def scale_of_kept(least: int) -> float:
    """What kept weights are multiplied by, so that their mean is that of all."""
    return WHOLE / (HALF - least)


def is_kept(seed: Tensor, least: int, *, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Whether a weight stays. `seed`: as `draw_seed` gives it; `least`: as `least_kept` does.

    Of integers of any width and shape that fit together. What depends on the query alone is computed for it alone:
    two words of it, so that no two rows of a mask are the same numbers at another place.
    """
    batch, head, query, key = (_narrow(place) for place in (batch, head, query, key))
    row = _mixed(_mixed(_mixed(seed[0] ^ batch) ^ head) ^ query)
    other = _mixed(_mixed(_mixed(seed[1] ^ query) ^ head) ^ batch)
    bits = row ^ (key * STRIDE)
    bits = (bits ^ ((bits >> 16) & LOW_16)) * FIRST + other
    bits = (bits ^ ((bits >> 15) & LOW_17)) * SECOND
    return bits >= least


def _narrow(place: Tensor) -> Tensor:
    """As int32, whatever width it has when it is run: code traced with 32 bits is run with 64 at times, and a
    conversion that changes nothing is not in the trace.
    """
    return place.to(torch.int64).to(torch.int32)


def _mixed(bits: Tensor) -> Tensor:
    """All 32 bits of each of the results depend on all of its own: lowbias32."""
    bits = (bits ^ ((bits >> 16) & LOW_16)) * FIRST
    bits = (bits ^ ((bits >> 15) & LOW_17)) * SECOND
    return bits ^ ((bits >> 16) & LOW_16)

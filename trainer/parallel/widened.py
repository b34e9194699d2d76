"""Sums in fp32 of what is held in fewer bits."""

from __future__ import annotations

from torch import Tensor

from trainer.schedule.flops import WIDENED_ELEMENTS


def add_widened(total: Tensor, part: Tensor) -> Tensor:
    """Add to an fp32 `total` a tensor of its shape and of any dtype, in place; returns it.

    On a GPU the addition widens each number as it reads it. On a CPU torch widens all of the tensor
    first, in new memory; so there the sum is made in strips.
    """
    is_plain = (
        total.device.type != "cpu" or total.dtype == part.dtype or total.numel() <= WIDENED_ELEMENTS
    )
    if is_plain or not (total.is_contiguous() and part.is_contiguous()):
        return total.add_(part)
    flat, added = total.view(-1), part.view(-1)
    room = flat.new_empty(WIDENED_ELEMENTS)
    for begin in range(0, flat.numel(), WIDENED_ELEMENTS):
        strip = flat[begin : begin + WIDENED_ELEMENTS]
        strip.add_(room[: strip.numel()].copy_(added[begin : begin + WIDENED_ELEMENTS]))
    return total

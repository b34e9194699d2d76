"""Gradients of micro batches, added up in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


@torch.no_grad()
def add_to_accumulated(
    optimizer: Any, parameter: nn.Parameter, group: int, index: int, clear_lp_grads: bool = False
) -> None:
    """Takes the place of DeepSpeed's own addition of a bf16 gradient to the fp32 one, in its bf16 optimizer.

    The library widens the gradient into a tensor of its own first. The addition widens each number as it reads it, with
    the same result: 10 bytes an element are moved in place of 18, and none are held.
    """
    gradient = parameter.grad
    if gradient is None:
        return
    accumulated = optimizer.fp32_groups_gradients[group][index]
    accumulated.add_(gradient.view(accumulated.shape))
    parameter._hp_grad = accumulated  # type: ignore[attr-defined]
    optimizer.fp32_groups_has_gradients[group][index] = True
    if clear_lp_grads:
        gradient.zero_()

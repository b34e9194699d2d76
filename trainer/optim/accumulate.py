"""Gradients of micro batches, added up in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.parallel.widened import add_widened


@torch.no_grad()
def add_to_accumulated(
    optimizer: Any, parameter: nn.Parameter, group: int, index: int, clear_lp_grads: bool = False
) -> None:
    """Takes the place of DeepSpeed's own addition of a bf16 gradient to the fp32 one, in its bf16
    optimizer.

    The library widens the gradient into a tensor of its own first. Here 10 bytes an element are
    moved in place of 18, and none are held, with the same result; of a step's first micro batch 6,
    as that is written over the step before's.
    """
    gradient = parameter.grad
    if gradient is None:
        return
    accumulated = optimizer.fp32_groups_gradients[group][index]
    if optimizer.fp32_groups_has_gradients[group][index]:
        add_widened(accumulated, gradient.view(accumulated.shape))
    else:
        accumulated.copy_(gradient.view(accumulated.shape))
    parameter._hp_grad = accumulated  # type: ignore[attr-defined]
    optimizer.fp32_groups_has_gradients[group][index] = True
    if clear_lp_grads:
        gradient.zero_()


def clear_gradients(optimizer: Any, set_to_none: bool = True) -> None:
    """Takes the place of DeepSpeed's own clearing behind a step: of the bf16 gradients alone. Each
    way out of the step itself has let the fp32 ones go.
    """
    optimizer.clear_lp_grads(set_to_none)


def forget_accumulated(optimizer: Any) -> None:
    """Takes the place of DeepSpeed's own clearing of the fp32 gradients, a pass over all of them:
    the next step's first ones are written over these.
    """
    for flags in optimizer.fp32_groups_has_gradients:
        flags[:] = [False] * len(flags)


@torch.no_grad()
def clear_forgotten(optimizer: Any) -> None:
    """Before gradients are summed over ranks: zero those of parameters that had none in this step."""
    groups = zip(optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients, strict=True)
    for gradients, flags in groups:
        for gradient, is_of_this_step in zip(gradients, flags, strict=True):
            if not is_of_this_step:
                gradient.zero_()

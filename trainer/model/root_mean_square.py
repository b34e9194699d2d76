"""Normalisation by the root mean square: x / sqrt(mean(x^2) + epsilon) x weight, in fp32, rounded once.

GPUs have a kernel for it. Elsewhere torch would make it of parts that keep six tensors for the backward pass; here the
input and a number of each row are kept, as by that kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def root_mean_square_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last dimension of `hidden`, in its dtype; `weight` [features]."""
    if hidden.is_cuda:
        return functional.rms_norm(hidden, weight.shape, weight, epsilon)
    found: Tensor = _RootMeanSquareNorm.apply(hidden, weight, epsilon)
    return found


class _RootMeanSquareNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = hidden.float()
        factor = wide.square().mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, factor)
        return (wide * factor * weight.float()).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight, factor = ctx.saved_tensors
        normed, wide = hidden.float() * factor, gradient.float()
        to_weight = (wide * normed).flatten(0, -2).sum(dim=0)
        wide = wide * weight.float()
        to_hidden = factor * (wide - normed * (wide * normed).mean(dim=-1, keepdim=True))
        return to_hidden.to(hidden.dtype), to_weight.to(weight.dtype), None

"""Matrix products at the machine's own speed, whatever the model's dtype.

A CPU without bf16 matrix instructions multiplies bf16 tens of times slower than fp32. There the factors of a product
are widened to fp32 and the result is rounded once, which is at least as exact. Elsewhere the products are torch's
own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which products of such tensors are fast on their device."""
    if tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and not _native_bf16():
        return torch.float32
    return tensor.dtype


@cache
def _native_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs [.., features] x weight [outputs, features] transposed, plus bias [outputs], in the inputs' dtype."""
    if compute_dtype(inputs) == inputs.dtype:
        return functional.linear(inputs, weight, bias)
    return _WideLinear.apply(inputs, weight, bias)


class _WideLinear(torch.autograd.Function):
    """A linear layer computed in fp32 that keeps only its narrow inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        wide = functional.linear(inputs.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        wide = gradient.float().reshape(-1, gradient.shape[-1])
        to_inputs = (wide @ weight.float()).to(inputs.dtype).view_as(inputs)
        to_weight = (wide.t() @ inputs.reshape(-1, inputs.shape[-1]).float()).to(weight.dtype)
        to_bias = wide.sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return to_inputs, to_weight, to_bias

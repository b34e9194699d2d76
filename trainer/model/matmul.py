"""Matrix products at the machine's own speed, whatever the model's dtype.

A CPU without 16-bit matrix instructions multiplies bf16 and fp16 tens of times slower than fp32.
There the factors of a product are widened to fp32 and the result is rounded once, which is at least
as exact. Elsewhere the products are torch's own, or in 8-bit floats where the layer says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from trainer.model import float8
from trainer.parallel.comm import start_all_reduce, start_gather, start_reduce_scatter


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which products of such tensors are fast on their device."""
    if (
        tensor.device.type == "cpu"
        and tensor.dtype in (torch.bfloat16, torch.float16)
        and not _is_native(tensor.dtype)
    ):
        return torch.float32
    return tensor.dtype


def _is_native(dtype: torch.dtype) -> bool:
    return _found_native(dtype)


# Not traced into a compiled block: what torch.compiler.assume_constant_result would set, for which
# torch's compiler would be loaded.
setattr(_is_native, "_dynamo_marked_constant", True)  # noqa: B010


@cache
def _found_native(dtype: torch.dtype) -> bool:
    operations = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return bool(operations._is_mkldnn_bf16_supported())
    return bool(operations._is_mkldnn_fp16_supported())


def linear(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, in_float8: bool = False
) -> Tensor:
    """inputs [.., features] x weight [outputs, features] transposed, plus bias [outputs], in the
    inputs' dtype.
    """
    if not in_float8 and compute_dtype(inputs) == inputs.dtype:
        return functional.linear(inputs, weight, bias)
    return _Linear.apply(inputs, weight, bias, in_float8, (None, False))


def column_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    is_cut: bool,
    in_float8: bool,
) -> Tensor:
    """Enter a tensor region through a linear layer: inputs [batch, sequence, features], whole or
    cut (`is_cut`).

    The same as `copy_to_tensor_region` or `gather_sequence` followed by `linear`, but it keeps only
    the inputs it was given, and exchanges the inputs' gradients while it computes the weight's.
    """
    return _Linear.apply(inputs, weight, bias, in_float8, (group, is_cut))


def _wide_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = compute_dtype(inputs)
    product = functional.linear(
        inputs.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    )
    return product.to(inputs.dtype)


def _input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    wide = compute_dtype(gradient)
    return (gradient.to(wide) @ weight.to(wide)).to(gradient.dtype)


def _weight_gradient(gradient: Tensor, inputs: Tensor) -> Tensor:
    wide = compute_dtype(gradient)
    rows = gradient.reshape(-1, gradient.shape[-1]).to(wide)
    return (rows.t() @ inputs.reshape(-1, inputs.shape[-1]).to(wide)).to(gradient.dtype)


def _bias_gradient(gradient: Tensor) -> Tensor:
    rows = gradient.reshape(-1, gradient.shape[-1])
    return rows.to(compute_dtype(gradient)).sum(dim=0).to(gradient.dtype)


class _Products(NamedTuple):
    """The three products of a linear layer, each given and giving tensors in the model's dtype."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor], Tensor]


_WIDE = _Products(_wide_linear, _input_gradient, _weight_gradient)
_FLOAT8 = _Products(float8.product, float8.input_gradient, float8.weight_gradient)


class _Linear(torch.autograd.Function):
    """A linear layer computed in fp32, or in 8-bit floats, that keeps only its inputs for the
    backward pass. With a `group` it is the entrance of a tensor region: see `column_linear`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        in_float8: bool,
        place: tuple[ProcessGroup | None, bool],
    ) -> Tensor:
        ctx.in_float8, ctx.place = in_float8, place
        ctx.save_for_backward(inputs, weight)
        group, is_cut = place
        if group is not None and is_cut:
            inputs = start_gather(inputs, group)()
        return (_FLOAT8 if in_float8 else _WIDE).forward(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        group, is_cut = ctx.place
        products = _FLOAT8 if ctx.in_float8 else _WIDE
        whole = start_gather(inputs, group) if is_cut else None
        to_inputs = products.input_gradient(gradient, weight)
        if whole is not None:
            inputs = whole()
        exchanged = None
        if group is not None:
            exchanged = (start_reduce_scatter if is_cut else start_all_reduce)(to_inputs, group)
        to_weight = products.weight_gradient(gradient, inputs)
        to_bias = None
        if ctx.needs_input_grad[2]:
            to_bias = _bias_gradient(gradient)
        if exchanged is not None:
            to_inputs = exchanged()
        return to_inputs, to_weight, to_bias, None, None

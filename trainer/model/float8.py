"""Products of a linear layer in 8-bit floats (`precision.float8`): weights, activations and their
gradients stay wider.

Both factors are rounded just before each product: weights and activations to e4m3 (4 bits),
gradients to e5m2 (3 bits, more range). A factor is first multiplied by a power of two that brings
its largest element just below the format's own largest, as found in the tensor itself. Powers of
two round nothing, so a slice of a tensor is rounded as the whole is, but where elements vanish:
another tensor-parallel degree changes next to nothing. Sums are taken in fp32.

torch's kernel (`torch._scaled_mm`) takes the first factor by rows and the second by columns, in
multiples of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trainer.config.kernel_choice import MULTIPLE

WEIGHTS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
HIGHEST = {WEIGHTS: 8, GRADIENTS: 15}  # 2^HIGHEST is the largest power of two that the format holds
# 2^-MOST_EXPONENT is a normal number in fp32 and bf16; no tensor needs a smaller factor
MOST_EXPONENT = 120


def rounded(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in `dtype`, scaled, and the fp32 number [] to multiply it with to have the tensor
    again.

    Where an element is not finite that number is NaN, as the formats have no infinity, or do not
    keep it.
    """
    # read once, nothing written
    largest = torch.linalg.vector_norm(tensor.detach(), torch.inf).float()
    exponent = torch.frexp(largest).exponent  # the largest is below 2^exponent
    shift = (HIGHEST[dtype] - exponent).clamp(-MOST_EXPONENT, MOST_EXPONENT).float()
    back = torch.where(largest.isfinite(), torch.exp2(-shift), torch.nan)
    return (tensor * torch.exp2(shift).to(tensor.dtype)).to(dtype), back


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs [.., features] x weight [outputs, features] transposed, plus bias, in the inputs'
    dtype.
    """
    rows, rows_scale = rounded(inputs.reshape(-1, inputs.shape[-1]), WEIGHTS)
    held, scale = rounded(weight, WEIGHTS)
    found = _multiplied(rows, held.t(), (rows_scale, scale), inputs.dtype, is_forward=True)
    return (found if bias is None else found + bias).view(*inputs.shape[:-1], weight.shape[0])


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """gradient [.., outputs] x weight [outputs, features]."""
    rows, rows_scale = rounded(gradient.reshape(-1, gradient.shape[-1]), GRADIENTS)
    held, scale = rounded(weight, WEIGHTS)
    found = _multiplied(rows, _by_columns(held), (rows_scale, scale), gradient.dtype)
    return found.view(*gradient.shape[:-1], weight.shape[1])


def weight_gradient(gradient: Tensor, inputs: Tensor) -> Tensor:
    """gradient [.., outputs] transposed x inputs [.., features]; rows of zeros fill up what is no
    multiple of 16.
    """
    missing = -gradient.shape[:-1].numel() % MULTIPLE
    columns, columns_scale = rounded(_filled_up(gradient, missing), GRADIENTS)
    rows, rows_scale = rounded(_filled_up(inputs, missing), WEIGHTS)
    return _multiplied(
        columns.t().contiguous(), _by_columns(rows), (columns_scale, rows_scale), gradient.dtype
    )


def _multiplied(
    left: Tensor,
    right: Tensor,
    scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    is_forward: bool = False,
) -> Tensor:
    """left [rows, shared] x right [shared, columns]; sums of forward products may be rounded to 14
    bits on the way.

    A CPU multiplies the same numbers in fp32: torch's kernel does not serve every one.
    """
    if left.device.type == "cpu":
        return (left.float() @ right.float() * scales[0] * scales[1]).to(dtype)
    return torch._scaled_mm(left, right, *scales, out_dtype=dtype, use_fast_accum=is_forward)


def _by_columns(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()


def _filled_up(tensor: Tensor, missing: int) -> Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1])
    if missing:
        return functional.pad(rows, (0, 0, 0, missing))
    return rows

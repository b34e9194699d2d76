"""SwiGLU: SiLU(gate) x up (Shazeer, arXiv 2002.05202), which keeps its input alone for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def gated_silu(both: Tensor) -> Tensor:
    """Gate and up side by side [.., 2 x features] -> [.., features]."""
    if torch.compiler.is_compiling():  # the compiler itself finds what to keep
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up
    found: Tensor = _GatedSiLU.apply(both)
    return found


class _GatedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        to_both = torch.empty_like(both)
        to_gate, to_up = to_both.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), gradient, out=to_up)
        to_gate.copy_(torch.ops.aten.silu_backward(gradient * up, gate))
        return to_both

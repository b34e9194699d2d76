"""Flex attention as a GPU has it, for counters: each compiled kernel is one operation. Nothing is
computed: what it computes is looked at in tests/trainer/model/test_attention_dropout.py, and how
many kernels in test_compiled.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.config.kernel_choice import SMALLEST_FLEX_HEAD
from trainer.model.kernels import FlexKernel


@torch.library.custom_op("tr11_tests::flex_attention", mutates_args=())
def _forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Mixed values as the queries lie, and the logarithm of each query's sum of exponentials."""
    raise NotImplementedError


@torch.library.custom_op("tr11_tests::flex_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


@torch.library.custom_op("tr11_tests::scaled", mutates_args=())
def _scaled(mixed: Tensor, kept: Tensor, every: Tensor) -> Tensor:
    """Mixed values times the share of what dropout keeps."""
    raise NotImplementedError


@torch.library.custom_op("tr11_tests::scaled_backward", mutates_args=())
def _scaled_backward(
    gradient: Tensor, mixed: Tensor, kept: Tensor, every: Tensor
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    lying_alike = query.transpose(1, 2).new_empty(*query.transpose(1, 2).shape[:3], value.shape[3])
    return lying_alike.transpose(1, 2), query.new_empty(query.shape[:3], dtype=torch.float32)


@_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sums: Tensor
) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@_scaled.register_fake
def _(mixed: Tensor, kept: Tensor, every: Tensor) -> Tensor:
    return torch.empty_like(mixed)


@_scaled_backward.register_fake
def _(gradient: Tensor, mixed: Tensor, kept: Tensor, every: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(mixed), torch.empty_like(kept)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs, *(output if isinstance(output, tuple) else ()))


def _attention_gradients(context: Any, gradient: Tensor, of_sums: Tensor) -> Any:
    return _backward(gradient, *context.saved_tensors)


def _scale_gradients(context: Any, gradient: Tensor) -> Any:
    mixed, of_sums = _scaled_backward(gradient, *context.saved_tensors)
    return mixed, of_sums, of_sums


_forward.register_autograd(_attention_gradients, setup_context=_keep)
_scaled.register_autograd(_scale_gradients, setup_context=_keep)


def _attend(
    kernel: FlexKernel, query: Tensor, key: Tensor, value: Tensor, mask: None, dropped: Any
) -> Tensor:
    mixed: Tensor
    mixed, kept = _forward(query, key, value)
    if dropped is None:
        return mixed
    _, every = _forward(query, key, value[..., :SMALLEST_FLEX_HEAD].detach())
    found: Tensor = _scaled(mixed, kept, every)
    return found


def take_flex(patch: pytest.MonkeyPatch) -> None:
    """All flex attention of this process is counted so."""
    patch.setattr(FlexKernel, "_attend_as_is", _attend)
    patch.setattr(FlexKernel, "mask", lambda *_: None)
    patch.setattr("torch.compile", lambda function: function)

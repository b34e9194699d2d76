"""Activation checkpointing: a block's activations are dropped and computed again in the backward
pass.

What is kept is the block's input. Without sequence parallelism all tensor ranks hold the same
input; with `model.partition_activations` each keeps a part of it, and the parts are joined again
just before the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from trainer.config.card import ModelSection
from trainer.model.documents import Stream, hidden_of, joined
from trainer.parallel.comm import share_of, whole_of
from trainer.parallel.mesh import Mesh


def recompute_function(model: ModelSection, mesh: Mesh) -> Callable[..., Stream]:
    """`function(run, *stream)`: calls `run(*stream)` and keeps only its input for the backward
    pass.
    """
    has_dropout = model.hidden_dropout > 0.0 or model.attention_dropout > 0.0
    if model.partition_activations and mesh.tensor_group is not None and not mesh.sequence_parallel:
        return partial(_partitioned, (mesh.tensor_group, has_dropout))
    return partial(
        checkpoint, use_reentrant=False, preserve_rng_state=has_dropout, determinism_check="none"
    )


def _partitioned(
    place: tuple[ProcessGroup, bool],
    run: Callable[..., Stream],
    hidden: Tensor,
    documents: Tensor | None = None,
) -> Stream:
    return joined(_Partitioned.apply(run, place, hidden, documents), documents)


class _Partitioned(torch.autograd.Function):
    """Parameters are not among the inputs: their gradients arise in the nested backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Stream],
        place: tuple[ProcessGroup, bool],
        hidden: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        ctx.run, (ctx.group, has_dropout), ctx.shape = run, place, hidden.shape
        if has_dropout:
            ctx.random = _random_state(hidden.device)
        else:
            ctx.random = None
        ctx.save_for_backward(share_of(hidden, ctx.group), documents)
        return hidden_of(run(*_arguments(hidden, documents)))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part, documents = ctx.saved_tensors
        hidden = whole_of(part, ctx.shape, ctx.group).requires_grad_()
        if part.device.type == "cuda":
            devices = [part.device]
        else:
            devices = []
        with torch.random.fork_rng(devices, enabled=ctx.random is not None), torch.enable_grad():
            if ctx.random is not None:
                _set_random_state(ctx.random, part.device)
            output, _ = hidden_of(ctx.run(*_arguments(hidden, documents)))
        torch.autograd.backward(output, gradient)
        return None, None, hidden.grad, None


def _arguments(hidden: Tensor, documents: Tensor | None) -> tuple[Tensor, ...]:
    if documents is None:
        return (hidden,)
    return (hidden, documents)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(
        device
    ) if device.type == "cuda" else None


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    host, accelerator = state
    torch.set_rng_state(host)
    if accelerator is not None:
        torch.cuda.set_rng_state(accelerator, device)

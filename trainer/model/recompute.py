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
from trainer.model.random import DropoutPlaces
from trainer.parallel.comm import share_of, whole_of
from trainer.parallel.mesh import Mesh


def recompute_function(
    model: ModelSection, mesh: Mesh, places: DropoutPlaces
) -> Callable[..., Stream]:
    """`function(run, *stream)`: calls `run(*stream)` and keeps only its input for the backward
    pass. `places`: where dropout is, whose masks are then those of this micro batch again.
    """
    if model.partition_activations and mesh.tensor_group is not None and not mesh.sequence_parallel:
        recomputed: Callable[..., Stream] = partial(_partitioned, mesh.tensor_group)
    else:
        recomputed = partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )

    def recomputing(run: Callable[..., Stream], *stream: Tensor) -> Stream:
        number = places.number

        def entered(*given: Tensor) -> Stream:
            places.enter(number)  # in the backward pass it is another one's turn
            return run(*given)

        return recomputed(entered, *stream)

    return recomputing


def _partitioned(
    group: ProcessGroup,
    run: Callable[..., Stream],
    hidden: Tensor,
    documents: Tensor | None = None,
) -> Stream:
    return joined(_Partitioned.apply(run, group, hidden, documents), documents)


class _Partitioned(torch.autograd.Function):
    """Parameters are not among the inputs: their gradients arise in the nested backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Stream],
        group: ProcessGroup,
        hidden: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        ctx.run, ctx.group, ctx.shape = run, group, hidden.shape
        ctx.save_for_backward(share_of(hidden, group), documents)
        return hidden_of(run(*_arguments(hidden, documents)))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part, documents = ctx.saved_tensors
        hidden = whole_of(part, ctx.shape, ctx.group).requires_grad_()
        with torch.enable_grad():
            output, _ = hidden_of(ctx.run(*_arguments(hidden, documents)))
        torch.autograd.backward(output, gradient)
        return None, None, hidden.grad, None


def _arguments(hidden: Tensor, documents: Tensor | None) -> tuple[Tensor, ...]:
    if documents is None:
        return (hidden,)
    return (hidden, documents)

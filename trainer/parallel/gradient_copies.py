"""Sums of the gradients of parameters that several ranks hold, so that no bit of the copies'
gradients differs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer.parallel.mesh import Mesh


def sum_copies(
    tied: Iterable[tuple[nn.Parameter, ProcessGroup]],
    replicated: Iterable[nn.Parameter],
    mesh: Mesh,
    accumulated: bool,
) -> None:
    """Sum the gradients of `tied` weights over their groups, and of `replicated` parameters over
    the tensor ranks.

    `accumulated`: they are in fp32 of their own. Replicated ones are small and many (LayerNorms,
    biases): they are summed in one buffer. Collective over replicas, tied stages and tensor ranks.
    """
    for weight, group in tied:
        gradient = _gradient(weight, accumulated)
        if gradient is not None:
            _sum(gradient, group, mesh)
    if mesh.tensor_group is not None:
        found = [
            gradient
            for item in replicated
            if (gradient := _gradient(item, accumulated)) is not None
        ]
        _sum_together(found, mesh.tensor_group, mesh)


def _gradient(parameter: nn.Parameter, accumulated: bool) -> Tensor | None:
    return parameter._hp_grad if accumulated else parameter.grad  # type: ignore[attr-defined]


def _sum_together(gradients: list[Tensor], group: ProcessGroup, mesh: Mesh) -> None:
    """The same of several, of one dtype, in one buffer for all."""
    if not gradients:
        return
    buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])
    _sum(buffer, group, mesh)
    parts = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _sum(gradient: Tensor, group: ProcessGroup, mesh: Mesh) -> None:
    """Replicas first, into the first of them; then the copies; the other replicas hold zeros, so
    that DeepSpeed's reduction over replicas changes nothing. In its own order, copies first, the
    terms of an element are added in an order that hangs on its place in a buffer: with three
    replicas or more the copies drift apart.
    """
    if mesh.data_group is not None:
        dist.reduce(
            gradient, mesh.rank_at(mesh.pipeline_rank, 0, mesh.tensor_rank), group=mesh.data_group
        )
    if mesh.data_rank == 0:
        dist.all_reduce(gradient, group=group)
    else:
        gradient.zero_()

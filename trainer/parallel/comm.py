"""The collectives of tensor parallelism, each with the right gradient.

Activations are [batch, sequence, features]. A *tensor region* (attention or MLP) starts from whole
hidden states and ends in partial sums of them. Outside, each tensor rank holds either a copy of the
whole hidden states, or, with sequence parallelism, its own stretch of the sequence:

    into a region      copy_to_tensor_region         gather_sequence
    out of it          reduce_from_tensor_region     reduce_scatter_sequence

In each column the two are each other's gradient. A group of None stands for one worker: the tensor
is returned as it is. `reduce_from_tensor_region` writes into its argument, which must not be used
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Pending = Callable[[], Tensor]


def copy_to_tensor_region(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Enter a region where each worker uses the same input differently: identity, gradients are
    summed.
    """
    if group is None:
        return tensor
    return _Copy.apply(tensor, group)


def reduce_from_tensor_region(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Leave such a region: partial results are summed, the gradient passes unchanged."""
    if group is None:
        return tensor
    return _Reduce.apply(tensor, group)


def gather_sequence(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Join the workers' stretches along dimension 1; the gradients are summed and cut again."""
    if group is None:
        return tensor
    return _Gather.apply(tensor, group)


def reduce_scatter_sequence(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum partial results and keep this worker's stretch of dimension 1; the gradient is joined.

    Raises ValueError when the sequence cannot be cut evenly.
    """
    if group is None:
        return tensor
    return _ReduceScatter.apply(tensor, group)


def stretch(length: int, group: ProcessGroup) -> slice:
    """The places of a sequence of `length` that this worker holds. Raises ValueError when it cannot
    be cut evenly.
    """
    parts = dist.get_world_size(group)
    if length % parts:
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut over {parts} tensor ranks; "
            "use a length that they divide, or switch parallel.sequence_parallel off"
        )
    size = length // parts
    first = dist.get_rank(group) * size
    return slice(first, first + size)


def share_of(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This worker's share of the elements of a tensor that all hold: flat, a copy; the last is
    filled with zeros.
    """
    flat = tensor.detach().reshape(-1)
    size = -(-flat.numel() // dist.get_world_size(group))
    mine = flat[dist.get_rank(group) * size :][:size]
    if mine.numel() == size:
        return mine.clone()
    share = flat.new_zeros(size)
    share[: mine.numel()] = mine
    return share


def whole_of(share: Tensor, shape: torch.Size, group: ProcessGroup) -> Tensor:
    """The tensor of `shape`, from every worker's share of it as `share_of` gave it."""
    shares = share.new_empty(share.numel() * dist.get_world_size(group))
    dist.all_gather_into_tensor(shares, share.reshape(-1), group=group)
    return shares[: shape.numel()].view(shape)


def start_all_reduce(tensor: Tensor, group: ProcessGroup) -> Pending:
    """Begin to sum `tensor` over the group, in place where it is contiguous; call the result to
    wait for the sum.
    """
    tensor = tensor.contiguous()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return _after(work, lambda: tensor)


def start_gather(tensor: Tensor, group: ProcessGroup) -> Pending:
    """Begin to join stretches [batch, part, ..] to [batch, sequence, ..]; call the result to wait
    for it.
    """
    parts = dist.get_world_size(group)
    batch, part, *rest = tensor.shape
    joined = tensor.new_empty(parts * batch, part, *rest)
    work = dist.all_gather_into_tensor(joined, tensor.contiguous(), group=group, async_op=True)
    return _after(
        work,
        lambda: (
            joined.view(parts, batch, part, *rest)
            .transpose(0, 1)
            .reshape(batch, parts * part, *rest)
        ),
    )


def start_reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Pending:
    """Begin to sum [batch, sequence, ..] and cut it to this worker's stretch; call the result to
    wait for it.
    """
    batch, length, *rest = tensor.shape
    mine = stretch(length, group)
    part = mine.stop - mine.start
    pieces = tensor.reshape(batch, length // part, part, *rest).transpose(0, 1).contiguous()
    result = tensor.new_empty(batch, part, *rest)
    work = dist.reduce_scatter_tensor(
        result, pieces.view(-1, part, *rest), group=group, async_op=True
    )
    return _after(work, lambda: result)


def _after(work: Any, result: Pending) -> Pending:
    def wait() -> Tensor:
        work.wait()
        return result()

    return wait


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return start_all_reduce(gradient, ctx.group)(), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return start_all_reduce(tensor.detach(), group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return start_gather(tensor, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return start_reduce_scatter(gradient, ctx.group)(), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return start_reduce_scatter(tensor, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return start_gather(gradient, ctx.group)(), None

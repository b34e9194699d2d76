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
Collective = Callable[[Tensor, ProcessGroup], Tensor]


def copy_to_tensor_region(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Enter a region where each worker uses the same input differently: identity, gradients are
    summed.
    """
    return exchange(tensor, group, _unchanged, _summed)


def reduce_from_tensor_region(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Leave such a region: partial results are summed, the gradient passes unchanged."""
    return exchange(tensor, group, _summed, _unchanged)


def gather_sequence(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Join the workers' stretches along dimension 1; the gradients are summed and cut again."""
    return exchange(tensor, group, _gathered, _summed_and_cut)


def reduce_scatter_sequence(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum partial results and keep this worker's stretch of dimension 1; the gradient is joined.

    Raises ValueError when the sequence cannot be cut evenly.
    """
    return exchange(tensor, group, _summed_and_cut, _gathered)


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


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: ProcessGroup, there: Collective, back: Collective
    ) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(tensor.detach(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient, ctx.group), None, None, None


def exchange(
    tensor: Tensor, group: ProcessGroup | None, there: Collective, back: Collective
) -> Tensor:
    """What `there` gives of the tensor; its gradient comes back by `back`."""
    if group is None:
        return tensor
    return _Exchange.apply(tensor, group, there, back)


def _unchanged(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


def _summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return start_all_reduce(tensor, group)()


def _gathered(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return start_gather(tensor, group)()


def _summed_and_cut(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return start_reduce_scatter(tensor, group)()

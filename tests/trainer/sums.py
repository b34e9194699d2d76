"""Sums over ranks as NCCL may take them: each group adds its members' terms in an order of its own.

gloo adds in one order whatever the group, so that two groups with the same terms always agree; NCCL
promises no such thing. Within a group all members get the same bits, as with NCCL.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# changes, in place, what the ranks of a group have just summed
Nudge = Callable[[Tensor, list[int]], None]


class _Done:
    """The handle of a collective that has ended."""

    def wait(self) -> bool:
        return True


def _added(tensor: Tensor, group: ProcessGroup | None, gather: Callable[..., Any]) -> Tensor:
    """The members' sum, added one by one in the group's own order; terms are rounded to the dtype
    at each addition.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    terms = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in ranks]
    gather(terms, tensor.contiguous(), group=group)
    order = random.Random(str(ranks)).sample(range(len(ranks)), len(ranks))
    total = terms[order[0]]
    for index in order[1:]:
        total = total + terms[index]
    return total


@contextlib.contextmanager
def in_any_order(nudge: Nudge | None = None) -> Iterator[None]:
    """Replace all sums of floating-point tensors over ranks; `nudge` sees each result of an
    all-reduce.
    """
    plain = {
        name: getattr(dist, name)
        for name in ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather")
    }
    added = partial(_added, gather=plain["all_gather"])

    def is_sum(tensor: Tensor, op: Any) -> bool:
        return bool(op == dist.ReduceOp.SUM) and tensor.is_floating_point()

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if not is_sum(tensor, op):
            return plain["all_reduce"](tensor, op=op, group=group, async_op=async_op)
        with torch.no_grad():
            tensor.copy_(added(tensor, group))
            if nudge is not None:
                nudge(tensor, dist.get_process_group_ranks(group or dist.group.WORLD))
        return _Done() if async_op else None

    def reduce(tensor: Tensor, dst: int, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        assert is_sum(tensor, op)
        total = added(tensor, group)
        if dist.get_rank() == dst:
            tensor.copy_(total)

    def reduce_scatter(
        output: Tensor,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        assert is_sum(tensor, op)
        parts = added(tensor, group).view(dist.get_world_size(group), *output.shape)
        output.copy_(parts[dist.get_rank(group)])
        return _Done() if async_op else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "reduce", reduce)
        patch.setattr(dist, "reduce_scatter_tensor", reduce_scatter)
        yield


def one_ulp(replica: int, data: int, tensor: int) -> Nudge:
    """Moves, by one unit in the last place, every single number that this replica's ranks have
    summed over the model.

    Ranks are numbered as `Mesh` numbers them: `data` replicas, `tensor` tensor ranks.
    """

    def nudge(summed: Tensor, ranks: list[int]) -> None:
        if (
            summed.numel() == 1
            and len(ranks) > tensor
            and all(rank // tensor % data == replica for rank in ranks)
        ):
            summed.copy_(torch.nextafter(summed, torch.full_like(summed, torch.inf)))

    return nudge

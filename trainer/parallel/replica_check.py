"""Invariants of a parallel training: copies that must be equal are equal to the last bit, and
numbers are finite.

A tensor is looked at a piece at a time: a sum in a wider dtype makes a copy of its terms first, and
beside a model that fills the device there is no room for one of 8 bytes an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer.parallel.mesh import Mesh
from trainer.parallel.shard import sharding_of

PIECE_ELEMENTS = 1 << 22  # in 8 bytes each: 32 MiB
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor) -> Tensor:
    """Sum of the tensor's bit patterns, an int64 scalar: tensors that differ in one element differ
    here.
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in bits.split(PIECE_ELEMENTS):
        total += piece.sum(dtype=torch.int64)
    return total


def square_sum(tensor: Tensor) -> Tensor:
    """Sum of the squares of all elements, an fp64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for piece in _pieces(tensor):
        total += piece.double().square().sum()
    return total


def disagreements(
    named: Sequence[tuple[str, nn.Parameter]], mesh: Mesh, tied_name: str | None
) -> list[str]:
    """Names of this worker's parameters whose copies are not bit-equal; the same answer on all
    ranks. Collective.

    Compared are: every parameter over data ranks, replicated ones over tensor ranks, and
    `tied_name`, where one is given, between the first and the last stage.
    """
    digests = torch.stack([digest(parameter) for _, parameter in named])
    differs = _unequal(digests, mesh.data_group)
    replicated = torch.tensor(
        [sharding_of(parameter).dim is None for _, parameter in named], device=digests.device
    )
    differs |= _unequal(torch.where(replicated, digests, 0), mesh.tensor_group)
    names = {name for (name, _), bad in zip(named, differs.tolist(), strict=True) if bad}
    if (
        tied_name is not None
        and mesh.pipeline > 1
        and _tied_differs(named, mesh, tied_name, digests)
    ):
        names.add(tied_name)
    return _union(names, mesh)


def not_finite(named: Iterable[tuple[str, Tensor]], mesh: Mesh) -> list[str]:
    """Names of this worker's tensors that hold NaN or infinity; the same answer on all ranks.
    Collective. The host waits for the device once, where all are finite.
    """
    held = list(named)
    sums = torch.stack([_sum(tensor).to(mesh.device) for _, tensor in held])
    looked_at = zip(held, (~sums.isfinite()).tolist(), strict=True)
    odd = {name for (name, tensor), is_odd in looked_at if is_odd and not is_finite(tensor)}
    return _union(odd, mesh)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity.

    Sums that are finite had finite terms alone, and are much quicker than looking at each; ones
    that are not may have grown too large, so each term is looked at then.
    """
    return bool(_sum(tensor).isfinite()) or all(
        bool(piece.isfinite().all()) for piece in _pieces(tensor)
    )


def _sum(tensor: Tensor) -> Tensor:
    """Of all elements, an fp32 scalar."""
    total = torch.zeros((), device=tensor.device)
    for piece in _pieces(tensor):
        total += piece.sum(dtype=torch.float32)
    return total


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.detach().reshape(-1).split(PIECE_ELEMENTS)


def _unequal(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Per element: whether the group's members hold different values."""
    if group is None:
        return torch.zeros_like(values, dtype=torch.bool)
    bounds = torch.stack((values, ~values))  # the maximum of ~x is ~ of the minimum of x
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    return bounds[0] != ~bounds[1]


def _tied_differs(
    named: Sequence[tuple[str, nn.Parameter]], mesh: Mesh, tied_name: str, digests: Tensor
) -> bool:
    mine = torch.zeros(1, dtype=torch.int64, device=digests.device)
    for index, (name, _) in enumerate(named):
        if name == tied_name:
            mine[0] = digests[index]
    stages = [torch.empty_like(mine) for _ in range(mesh.pipeline)]
    dist.all_gather(stages, mine, group=mesh.pipeline_group)
    return not torch.equal(stages[0], stages[-1])


def _union(names: set[str], mesh: Mesh) -> list[str]:
    """All ranks' names, sorted. The names travel only when there are any."""
    if mesh.world_size == 1:
        return sorted(names)
    found = torch.tensor([len(names)], device=mesh.device)
    dist.all_reduce(found)
    if not int(found):
        return []
    everywhere: list[set[str]] = [set() for _ in range(mesh.world_size)]
    dist.all_gather_object(everywhere, names)
    return sorted(set().union(*everywhere))

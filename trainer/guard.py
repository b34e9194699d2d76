"""Invariants of a parallel training: copies that must be equal are equal to the last bit, and numbers are finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer.mesh import Mesh
from trainer.shard import sharding_of

_BLOCK_ELEMENTS = 1 << 24
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor) -> Tensor:
    """Sum of the tensor's bit patterns, an int64 scalar: tensors that differ in one element differ here."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def disagreements(named: Sequence[tuple[str, nn.Parameter]], mesh: Mesh, tied_name: str) -> list[str]:
    """Names of this worker's parameters whose copies are not bit-equal; the same answer on all ranks. Collective.

    Compared are: every parameter over data ranks, replicated ones over tensor ranks, and `tied_name` between the
    first and the last stage.
    """
    digests = torch.stack([digest(parameter) for _, parameter in named])
    differs = _unequal(digests, mesh.data_group)
    replicated = torch.tensor([sharding_of(parameter).dim is None for _, parameter in named], device=digests.device)
    differs |= _unequal(torch.where(replicated, digests, 0), mesh.tensor_group)
    names = {name for (name, _), bad in zip(named, differs.tolist(), strict=True) if bad}
    if mesh.pipeline > 1 and _tied_differs(named, mesh, tied_name, digests):
        names.add(tied_name)
    return _union(names, mesh)


def not_finite(named: Iterable[tuple[str, Tensor]], mesh: Mesh) -> list[str]:
    """Names of this worker's tensors that hold NaN or infinity; the same answer on all ranks. Collective."""
    return _union({name for name, tensor in named if not is_finite(tensor)}, mesh)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity.

    A sum that is finite had finite terms alone, and is much quicker than looking at each; one that is not may have
    grown too large, so each is looked at then, a block at a time.
    """
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach().sum(dtype=torch.float32))):
        return True
    flat = tensor.detach().reshape(-1)
    return all(bool(torch.isfinite(block).all()) for block in flat.split(_BLOCK_ELEMENTS))


def _unequal(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Per element: whether the group's members hold different values."""
    if group is None:
        return torch.zeros_like(values, dtype=torch.bool)
    bounds = torch.stack((values, ~values))  # the maximum of ~x is ~ of the minimum of x
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    return bounds[0] != ~bounds[1]


def _tied_differs(named: Sequence[tuple[str, nn.Parameter]], mesh: Mesh, tied_name: str, digests: Tensor) -> bool:
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

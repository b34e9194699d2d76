"""What can be seen only at the moment of the update: the time it takes, and the zeros among its
gradients.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.optim.interface import PartitionShare, TrainingOptimizer
from trainer.parallel.mesh import Mesh

RunsOf = Mapping[int, Sequence[PartitionShare]]
"""By the `id` of a partition, as an update may be shown the partitions one by one."""


def counted_runs(
    optimizer: TrainingOptimizer,
    shares: Iterable[PartitionShare],
    mesh: Mesh,
    tied_copy: str | None,
) -> RunsOf:
    """The shares by which all ranks together count every logical element once: a tied copy is left
    out, and of what all tensor ranks hold alike only the first rank's counts. Padding of the
    partitions is in none.
    """
    runs: dict[int, list[PartitionShare]] = {}
    for share in shares:
        if share.name != tied_copy and (share.is_sharded or mesh.tensor_rank == 0):
            runs.setdefault(id(optimizer.partition(share.group)), []).append(share)
    return runs


def partitions_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Those that an update is about."""
    for group in optimizer.param_groups:
        yield from group["params"]


class UpdateWatch:
    """Looks at every update of the optimizer that ZeRO-1 drives. Install it once, `begin` before
    each step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: Mesh, count_zeros: bool):
        self._mesh = mesh
        self._count_zeros = count_zeros
        self._runs: RunsOf = {}
        self._zeros = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._began = 0.0
        self._seconds = 0.0
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def locate(self, runs: RunsOf) -> None:
        """Note what counts of the partitions."""
        self._runs = runs

    def begin(self) -> None:
        """Forget the last step's time."""
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Time in the optimizer's own update during this step, on this rank (launch time only, on a
        GPU).
        """
        return self._seconds

    def take_zeros(self) -> int:
        """Zero elements among all gradients of the steps since the last call; 0 when they are not
        counted. Collective.

        It reads the device, which nothing else here does: it is called where the count is logged.
        """
        if not self._count_zeros:
            return 0
        total = self._zeros.clone()
        self._zeros.zero_()
        if self._mesh.world_size > 1:
            dist.all_reduce(total)
        return int(total)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._count_zeros:
            for partition in partitions_of(optimizer):
                gradient = partition.grad
                if gradient is None:
                    continue
                for run in self._runs.get(id(partition), ()):
                    self._zeros += (gradient.narrow(0, run.start, run.numel) == 0).sum()
        self._began = time.perf_counter()

    def _after(self, *_: Any) -> None:
        self._seconds += time.perf_counter() - self._began

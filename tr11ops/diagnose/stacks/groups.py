"""Workers with the same stack in one row: who they are, what they wait in, since how many looks.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tr11ops.cluster.arrays import format_ranges, nodes_text
from tr11ops.diagnose.stacks.waits import StackWait, WaitKind, wait_of
from tr11ops.diagnose.stacks.worker import Frame, WorkerStack
from trainer.contract.record import Record


class StackGroup(Record):
    """Workers that stand at the same place, by rank. `looks`: in how many looks in a row none of
    them has moved.
    """

    wait: StackWait
    workers: tuple[WorkerStack, ...]
    looks: int = 1

    @property
    def frames(self) -> tuple[Frame, ...]:
        return self.workers[0].frames

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(worker.rank for worker in self.workers)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted({worker.node for worker in self.workers}))


def grouped(
    workers: Iterable[WorkerStack], looks: Mapping[int, int] | None = None
) -> tuple[StackGroup, ...]:
    """The groups, the smallest first: the odd one is on top. `looks`: of each rank, as `looks_of`
    counts them.
    """
    found: dict[tuple[StackWait, tuple[Frame, ...]], list[WorkerStack]] = {}
    for worker in sorted(workers, key=lambda one: one.rank):
        found.setdefault((wait_of(worker), worker.frames), []).append(worker)
    counted = looks or {}
    groups = [
        StackGroup(wait, tuple(members), min(counted.get(one.rank, 1) for one in members))
        for (wait, _), members in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: (len(group.workers), group.ranks)))


def looks_of(
    before: Mapping[int, WorkerStack], counts: Mapping[int, int], now: Sequence[WorkerStack]
) -> dict[int, int]:
    """Rank -> in how many looks in a row its process stood at the same place, this one included."""
    return {
        worker.rank: counts.get(worker.rank, 1) + 1 if _same(before.get(worker.rank), worker) else 1
        for worker in now
    }


def _same(before: WorkerStack | None, now: WorkerStack) -> bool:
    """Whether it has not moved. Where no stack could be read, nothing is known."""
    if before is None or (not now.frames and wait_of(now).kind is WaitKind.UNREAD):
        return False
    return _place(before) == _place(now)


def _place(worker: WorkerStack) -> tuple[object, ...]:
    return worker.pid, worker.node, worker.frames, worker.is_stopped, worker.is_dead


def ranks_text(ranks: Iterable[int]) -> str:
    """`0-3,5`."""
    return format_ranges(sorted(set(ranks)))


def nodes_words(nodes: Iterable[str]) -> str:
    """`node tw07`, `nodes tw[01-04]`."""
    names = set(nodes)
    return f"{'node' if len(names) == 1 else 'nodes'} {nodes_text(names)}"


def ranks_words(ranks: Iterable[int]) -> str:
    """`rank 5`, `ranks 0-3,5`."""
    numbers = set(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {ranks_text(numbers)}"

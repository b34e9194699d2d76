"""How many nodes a run may exclude: one answer for the command, the watchdog, the detectors and the
job. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Self

from tr11ops.base.units import counted
from tr11ops.cluster.base import Job, Node
from tr11ops.cluster.capacity import with_room
from trainer.contract.record import Record

DEFAULT_PERCENT = 10.0
KEY = "resilience.exclusion_cap_percent"


def most_exclusions(partition_nodes: int, needed_nodes: int, percent: float | None = None) -> int:
    """How many nodes of a partition may be excluded: a share of it (rounded up), and never into
    what a run needs.

    None: DEFAULT_PERCENT, or half of what the run leaves idle where that is more, but no more nodes
    than it needs.
    """
    idle = max(0, partition_nodes - needed_nodes)
    share = math.ceil(partition_nodes * (DEFAULT_PERCENT if percent is None else percent) / 100)
    if percent is None:
        share = max(share, min(math.ceil(idle / 2), needed_nodes))
    return min(share, idle)


def percent_for(partition_nodes: int, needed_nodes: int, count: int) -> int | None:
    """The least whole percentage that lets `count` nodes be excluded; None where a run needs the
    others.
    """
    if not 0 < count <= partition_nodes - needed_nodes:
        return None
    return min(100, (count - 1) * 100 // partition_nodes + 1)


def partition_nodes(nodes: Iterable[Node], *named: str | None) -> tuple[Node, ...]:
    """The nodes that count for a run: those of the first of these partitions that has any; all
    where none has.

    Who asks names those of the run's queued jobs first ("a,b": either), then the card's, then those
    of the run's other jobs, then the cluster's default one, as far as each is known.
    """
    every = tuple(nodes)
    for name in filter(None, named):
        wanted = set(name.split(","))
        found = tuple(node for node in every if wanted & set(node.partitions))
        if found:
            return found
    return every


def partitions_of(jobs: Iterable[Job]) -> str:
    """The partitions of these jobs as one name for `partition_nodes`; "" where none says its own."""
    return ",".join(sorted({job.partition for job in jobs if job.partition}))


class ExclusionLimit(Record):
    """The limit of one run at one moment. `names`: the nodes that count, None where they are not
    known (all count).
    """

    most: int
    names: frozenset[str] | None = None
    needed: int = 0

    @classmethod
    def of(cls, partition: Collection[str], needed: int, percent: float | None) -> Self:
        """For these nodes (see `partition_nodes`). What is excluded outside of them, or is gone,
        does not count.

        `needed` are the nodes of one attempt, spares included; `percent` is the card's KEY.
        """
        return cls(most_exclusions(len(partition), needed, percent), frozenset(partition), needed)

    @classmethod
    def of_run(
        cls,
        nodes: Iterable[Node],
        jobs: Iterable[Job],
        *,
        partitions: Iterable[str | None],
        allocated: int,
        percent: float | None,
    ) -> Self:
        """For a run as it is now: its queued `jobs` say how many nodes an attempt needs, and where.

        Where none is queued it is the card that says it: `allocated` nodes, in the first of
        `partitions`.
        """
        every = tuple(nodes)
        queued = with_room(jobs, every)
        counting = partition_nodes(every, partitions_of(queued), *partitions)
        needed = max((job.node_count for job in queued), default=allocated)
        return cls.of([node.name for node in counting], needed, percent)

    def counted(self, excluded: Iterable[str]) -> int:
        """How many of these count."""
        names = set(excluded)
        return len(names if self.names is None else names & self.names)

    def left(self, excluded: Iterable[str]) -> int:
        """How many more may be excluded beside these."""
        return max(0, self.most - self.counted(excluded))

    def forbids(self, nodes: Iterable[str], excluded: Iterable[str]) -> bool:
        """Whether these would be too many beside those that are excluded; one that is excluded
        already may stay.
        """
        before = frozenset(excluded)
        total = self.counted(before.union(nodes))
        return total > max(self.most, self.counted(before))

    def __str__(self) -> str:
        if self.names is None:
            return f"{self.most} may be excluded while it is not known how many nodes there are"
        of = f"of the partition's {counted(len(self.names), 'node')} at most {self.most} may be excluded"
        return f"{of}, for an attempt needs {self.needed} ({KEY})"


def way_past(node: str) -> str:
    """The command with which a person excludes a node all the same."""
    return f"tr11 nodes exclude {node} --force --reason REASON"

"""How many nodes a run may exclude: one answer for the command, the watchdog, the detectors and the job. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self

DEFAULT_PERCENT = 10.0
KEY = "resilience.exclusion_cap_percent"


def most_exclusions(partition_nodes: int, needed_nodes: int, percent: float | None = None) -> int:
    """How many nodes of a partition may be excluded: a share of it (rounded up), and never into what a run needs.

    None: DEFAULT_PERCENT, or half of what the run leaves idle where that is more, but no more nodes than it needs.
    """
    idle = max(0, partition_nodes - needed_nodes)
    share = math.ceil(partition_nodes * (DEFAULT_PERCENT if percent is None else percent) / 100)
    if percent is None:
        share = max(share, min(math.ceil(idle / 2), needed_nodes))
    return min(share, idle)


@dataclass(frozen=True)
class ExclusionLimit:
    """The limit of one run at one moment. `names`: the nodes that count, None where they are not known (all count)."""

    most: int
    names: frozenset[str] | None = None
    needed: int = 0

    @classmethod
    def of(cls, partition: Collection[str], needed: int, percent: float | None) -> Self:
        """For a partition of these nodes. What is excluded outside of it, or is gone from it, does not count.

        `needed` are the nodes of one attempt, spares included; `percent` is the card's KEY.
        """
        return cls(most_exclusions(len(partition), needed, percent), frozenset(partition), needed)

    def counted(self, excluded: Iterable[str]) -> int:
        """How many of these count."""
        names = set(excluded)
        return len(names if self.names is None else names & self.names)

    def forbids(self, node: str, excluded: Iterable[str]) -> bool:
        """Whether this node would be one too many beside those that are excluded."""
        others = set(excluded) - {node}
        return (self.names is None or node in self.names) and self.counted(others) >= self.most

    def __str__(self) -> str:
        if self.names is None:
            return f"{self.most} may be excluded while it is not known how many nodes there are"
        of = f"of the partition's {len(self.names)} nodes at most {self.most} may be excluded"
        return f"{of}, for an attempt needs {self.needed} ({KEY})"


def way_past(node: str) -> str:
    """The command with which a person excludes a node all the same."""
    return f"tr11 nodes exclude {node} --force --reason REASON"

"""Which innocent nodes tr11 held to be guilty, even if only for a while: in any version of the
ledger, in any launch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tr11ops.rundir.exclusion import NodeStanding
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, VERSIONS_KEPT, Version, read_version
from tr11ops.rundir.versioned import VersionedFile


@dataclass
class InnocenceJudge:
    """Judges what was added to a run's ledger since the last time. `read_to`: the newest version
    that was judged.

    `avoided`: innocent nodes that were not used for a while, each time that it was begun; no error
    by itself.
    """

    ledger: Path
    read_to: int = 0
    avoided: list[str] = field(default_factory=list)
    # launches that had ended: attempt, number
    judged: set[tuple[str, int]] = field(default_factory=set)
    # of these, the ones in the newest version that was judged
    _left_out: frozenset[str] = frozenset()

    def excluded(self, guilty: Collection[str]) -> list[str]:
        """Nodes without a fault of their own that tr11 had excluded in a version since; what it
        avoided is kept.
        """
        found: set[str] = set()
        for version in self._new_versions():
            kept_off = {
                entry.node: entry.state
                for entry in version.exclusions
                if entry.owner == AUTOMATIC_OWNER and entry.node not in guilty
            }
            excluded = {node for node, state in kept_off.items() if state == NodeStanding.EXCLUDE}
            left_out = frozenset(kept_off) - excluded
            self.avoided += sorted(left_out - self._left_out)
            self._left_out = left_out
            found |= excluded
        return sorted(found)

    def blamed(self, launches: Iterable[Mapping[str, Any]], guilty: Collection[str]) -> list[str]:
        """Nodes without a fault of their own that launches which ended since blame: on the ledger
        or not, these are not used again. `launches`: all records.
        """
        found: set[str] = set()
        for launch in launches:
            name = (launch["job_id"], launch["launch"])
            if launch["end"] is not None and name not in self.judged:
                self.judged.add(name)
                found.update(launch["blamed"])
        return sorted(found - set(guilty))

    def _new_versions(self) -> list[Version]:
        versions = VersionedFile(self.ledger, VERSIONS_KEPT)
        numbers = [number for number in versions.numbers() if number > self.read_to]
        if not numbers:
            return []
        assert numbers[0] == self.read_to + 1, (
            f"versions {self.read_to + 1} to {numbers[0] - 1} were never judged"
        )
        self.read_to = numbers[-1]
        return [read_version(versions.file(number)) for number in numbers]

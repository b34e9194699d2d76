"""A worker computed something else than it did before, or than the other replicas did: its node may
not train on.

What to do: exclude the node, stop, and go back to a checkpoint from before the error.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.nodes_left import excluded_nodes
from tr11ops.detect.without_node import exclude_command, start_again
from tr11ops.observe.snapshot import Snapshot
from tr11ops.observe.training import Corruption

BOUND = "one bit"
SEVERITIES = "CRITICAL"
NAME = "silent-corruption"
NEEDS = ("training.corruptions", "exclusions")

QUOTED = 3


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """CRITICAL for each suspect node, until it is excluded. Of two that differ without a third,
    each is a suspect.
    """
    if isinstance(snapshot.exclusions, Unknown):
        return
    by_node: dict[str, list[Corruption]] = {}
    for found in known(snapshot.training.corruptions, ()):
        by_node.setdefault(found.node, []).append(found)
    excluded = excluded_nodes(snapshot)
    for node, entries in by_node.items():
        if node in excluded:
            continue
        is_certain = any(entry.certain for entry in entries)
        last = entries[-1]
        yield Finding(
            NAME,
            Severity.CRITICAL,
            f"{node} computes wrongly"
            if is_certain
            else f"{node} or another node computes wrongly",
            subject=node,
            identity=(node,),
            evidence=(
                *(f"iteration {entry.iteration}: {entry.why}" for entry in entries[-QUOTED:]),
                f"last found {duration(max(0.0, snapshot.time - last.time))} ago",
            ),
            fix=exclude_command(snapshot, node, "it computes something else than the others"),
            then=start_again(snapshot, node),
        )

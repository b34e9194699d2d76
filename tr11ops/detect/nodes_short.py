"""The partition has fewer usable nodes than one attempt needs: only the site, or a smaller card,
helps.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted, first_few
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.nodes_left import (
    fewer_spares,
    needed_next,
    nodes_of_partition,
    partition_of,
    take_back,
    usable_nodes,
)
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.exclusion import Exclusion

BOUND = "at once"
SEVERITIES = "WARNING, CRITICAL when nothing runs, but for a maintenance"
NAME = "nodes-short"
NEEDS = ("nodes", "exclusions", "jobs")
NAMES_SHOWN = 8


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """CRITICAL when nothing of the run has an allocation, for no attempt can start; WARNING while
    one has.

    A maintenance gives the nodes back by itself: WARNING too.
    """
    usable, needed = usable_nodes(snapshot), needed_next(snapshot)
    if isinstance(snapshot.jobs, Unknown) or usable is None or needed is None or usable >= needed:
        return
    partition = partition_of(snapshot)
    nodes = nodes_of_partition(snapshot, partition)
    if len(nodes) < needed:  # the card asks for more than there is, which a launch refuses
        return
    # a controller that has just begun knows no node yet
    if usable + sum(node.is_unknown for node in nodes) >= needed:
        return
    excluded: tuple[Exclusion, ...] = known(snapshot.exclusions, ())
    listed = {entry.node for entry in excluded}
    gone = [
        f"{node.name} ({' '.join(sorted(node.states))})" for node in nodes if not node.is_usable
    ]
    kept_off = sorted(node.name for node in nodes if node.is_usable and node.name in listed)
    total, where = counted(len(nodes), "node"), f" in {partition}" if partition else ""
    evidence = [f"{total}{where}, {usable} usable, {needed} needed"]
    evidence += [f"not usable: {first_few(gone, NAMES_SHOWN)}"] if gone else []
    evidence += [f"excluded by the run: {first_few(kept_off, NAMES_SHOWN)}"] if kept_off else []
    fewer = _with_fewer_spares(snapshot, usable)
    if fewer:
        evidence.append(
            "what is queued starts by itself when its nodes are back; the command queues it with fewer spares"
        )
    trains = bool(snapshot.active_jobs)
    is_closed = derived.closed_by_site(snapshot) is not None
    need, further = counted(needed, "is", "are"), "further " if trains else ""
    yield Finding(
        NAME,
        Severity.WARNING if trains or is_closed else Severity.CRITICAL,
        f"{usable} of {total} can be used, {need} needed: no {further}attempt can start",
        subject=partition,
        evidence=tuple(evidence),
        fix=take_back(snapshot, kept_off) or fewer or derived.command(snapshot, "nodes list"),
    )


def _with_fewer_spares(snapshot: Snapshot, usable: int) -> str:
    """The command that queues the waiting attempts again with as many spares as there are; "" where
    those that train would not fit, or where nothing of the run's waits that may start now.
    """
    spares = fewer_spares(snapshot, usable)
    is_closed = derived.some_wait_for_site(snapshot) or derived.stop_of(snapshot) is not None
    if not spares or snapshot.active_jobs or is_closed:
        return ""
    if not derived.some_wait_for_nodes(snapshot) and not any(
        map(derived.is_dead, snapshot.pending_jobs)
    ):
        return ""
    return derived.command(snapshot, f"launch --replace {spares}")

"""As many nodes are excluded as may be, or nearly; and bad nodes that the cap leaves in use."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted, first_few
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.nodes_left import (
    are_all_meant,
    bad_nodes,
    cannot_return,
    excluded_nodes,
    exclusion_limit,
    needed_next,
    nodes_of_partition,
    partition_of,
    spare_nodes,
    take_back,
    unusable_exclusions,
    usable_nodes,
)
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.exclusion import KEY, percent_for, way_past

BOUND = "one left; none left"
SEVERITIES = "INFO, WARNING; INFO where people excluded all of them within the last day"
NAME = "exclusion-cap"
NEEDS = ("exclusions", "nodes", "jobs", "readmissions")
NAMED = 6
NOTE = "note.txt"  # as the runbook's page calls it


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """INFO when one more exclusion is allowed, WARNING when none is; silent where no node is
    excluded.

    A WARNING for each node that was found bad and could not be excluded any more; INFO while it is
    down.
    """
    if isinstance(snapshot.jobs, Unknown):
        return
    yield from _left_in_use(snapshot)
    yield from _near(snapshot)


def _left_in_use(snapshot: Snapshot) -> Iterator[Finding]:
    limit = exclusion_limit(snapshot)
    dead = {node.name for node in known(snapshot.nodes, ()) if node.is_gone or node.is_silent}
    for node, why in sorted(bad_nodes(snapshot).items()):
        if node in dead:
            yield Finding(
                NAME,
                Severity.INFO,
                f"{node} was found bad and is not excluded: the scheduler gives it to no one while it is down",
                subject=node,
                evidence=(*((why,) if why else ()), str(limit)),
                identity=(node,),
            )
            continue
        yield Finding(
            NAME,
            Severity.WARNING,
            f"{node} was found bad and is not excluded: the next attempt may get it",
            subject=node,
            evidence=(
                *((why,) if why else ()),
                str(limit),
                f"to exclude it all the same: `{_past(snapshot, node)}`",
            ),
            fix=_what_helps(snapshot, node, why),
            identity=(node,),
        )


def _near(snapshot: Snapshot) -> Iterator[Finding]:
    excluded = excluded_nodes(snapshot)
    in_partition = {node.name for node in nodes_of_partition(snapshot, partition_of(snapshot))}
    names = sorted(excluded & in_partition)
    limit = exclusion_limit(snapshot)
    if not names or limit is None:
        return
    left = limit.most - len(names)
    usable = usable_nodes(snapshot)
    if left > 1:
        return
    named, there = counted(len(names), "node is", "nodes are"), counted(len(in_partition), "node")
    evidence: tuple[str, ...] = (
        f"excluded: {first_few(names, NAMED)}",
        f"{there}, {usable} usable, {limit.needed} needed; at most {limit.most} may be excluded",
    )
    if left < 1:
        title = f"{named} excluded, no more may be: {_what_may_be_lost(snapshot)}"
        severity = Severity.INFO if are_all_meant(snapshot, names) else Severity.WARNING
        evidence = (*evidence, f"to exclude one all the same: `{_past(snapshot, 'NODE')}`")
    else:
        title, severity = f"{named} excluded, one more may be", Severity.INFO
    fix = take_back(snapshot, names)
    if not fix:
        evidence = (
            *evidence,
            f"none can come back now: {first_few(cannot_return(snapshot, names), NAMED)}",
        )
        fix = _note_for_site(snapshot, names)
    evidence = (*evidence, _how_more_may_be(snapshot, len(in_partition), limit.needed, len(names)))
    since = max(
        (
            entry.since
            for entry in known(snapshot.exclusions, ())
            if entry.node in names and entry.since
        ),
        default=None,
    )
    # since the last of them
    yield Finding(NAME, severity, title, evidence=evidence, fix=fix, since=since)


def _how_more_may_be(snapshot: Snapshot, partition_nodes: int, needed: int, excluded: int) -> str:
    """What a person may do so that tr11 excludes by itself again, the queued tasks among it; or
    that nothing does.
    """
    percent = percent_for(partition_nodes, needed, excluded + 1)
    if percent is None:
        return f"a greater {KEY} would not help: an attempt needs all others"
    command = derived.command(snapshot, f"launch --replace --set {KEY}={percent}")
    return (
        f"so that more may be: {KEY} = {percent} in the card; for what is queued now, `{command}`"
    )


def _note_for_site(snapshot: Snapshot, names: Collection[str]) -> str:
    """The command that writes what the site has to repair; "" where all are excluded because
    someone wants it so.
    """
    if not unusable_exclusions(snapshot, names):
        return ""
    return derived.command(snapshot, f"nodes list --excluded --report {NOTE}")


def _what_may_be_lost(snapshot: Snapshot) -> str:
    """How many nodes an attempt goes on without, by its spares: the one that runs as it is now,
    else the next one.
    """
    spares, runs = spare_nodes(snapshot)
    if not spares:
        return "the next bad node stops the run"
    if runs:
        return f"the attempt can lose {counted(spares, 'more node')}, and stops at the next"
    return f"an attempt can lose {counted(spares, 'node')}, and stops at the next"


def _what_helps(snapshot: Snapshot, node: str, why: str) -> str:
    """Its exclusion past the cap, where an attempt still finds its nodes without it; else a check
    of it.
    """
    usable, needed = usable_nodes(snapshot), needed_next(snapshot)
    if usable is None or needed is None or usable <= needed:
        return derived.command(snapshot, f"nodes check {node}")
    return _past(snapshot, node, why or "it was found bad")


def _past(snapshot: Snapshot, node: str, why: str = "") -> str:
    command = way_past(node).removeprefix("tr11 ")
    if why:
        command = command.replace("REASON", shlex.quote(why))
    return derived.command(snapshot, command)

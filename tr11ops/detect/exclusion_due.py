"""Excluded nodes that should have been checked again by now: each may be fine, and is missing."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import known
from tr11ops.base.units import duration, first_few
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.exclusion import kept_off
from tr11ops.rundir.exclusions import due_for_recheck

BOUND = "a day"
SEVERITIES = "INFO"
NAME = "exclusion-due"
NEEDS = ("exclusions",)

NAMED = 4
GRACE_SECONDS = derived.DAY  # the periodic check comes round several times in it


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """INFO, one for all nodes whose time has been over for more than a day."""
    late = due_for_recheck(known(snapshot.exclusions, ()), snapshot.time - GRACE_SECONDS)
    if not late:
        return
    if len(late) == 1:
        word = "an excluded node waits"
    else:
        word = f"{len(late)} excluded nodes wait"
    evidence = tuple(
        f"{entry.node}: due for {duration(snapshot.time - (entry.until or snapshot.time))}"
        + (f", {kept_off(entry.state)} because {entry.why}" if entry.why else "")
        for entry in late[:NAMED]
    )
    yield Finding(
        NAME,
        Severity.INFO,
        f"{word} for a check: {first_few((entry.node for entry in late), NAMED)}",
        evidence=evidence,
        fix=derived.command(snapshot, "nodes check --due"),
    )

"""Excluded nodes that should have been checked again by now: each may be fine, and is missing."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.exclusions import due_for_recheck
from tr11ops.snapshot import Snapshot, known
from tr11ops.units import duration

NAME = "exclusion-due"
NEEDS = ("exclusions",)

GRACE_SECONDS = signs.DAY  # the periodic check comes round several times in it


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """INFO, one for all nodes whose time has been over for more than a day."""
    late = due_for_recheck(known(snapshot.exclusions, ()), snapshot.time - GRACE_SECONDS)
    if not late:
        return
    word = "an excluded node waits" if len(late) == 1 else f"{len(late)} excluded nodes wait"
    evidence = tuple(
        f"{entry.node}: due for {duration(snapshot.time - (entry.until or snapshot.time))}"
        + (f", excluded because {entry.why}" if entry.why else "")
        for entry in late[:4]
    )
    yield Finding(
        NAME,
        Severity.INFO,
        f"{word} for a check: {', '.join(entry.node for entry in late[:4])}{' ...' if len(late) > 4 else ''}",
        evidence=evidence,
        fix=signs.command(snapshot, "nodes check --due"),
    )

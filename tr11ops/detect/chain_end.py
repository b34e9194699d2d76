"""The array's end is in sight: the queued tasks do not cover the training that is left."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Snapshot
from tr11ops.units import duration


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """A warning from one task before the end on: a new submission takes its time in the queue."""
    active, waiting = signs.active_jobs(snapshot), signs.startable_jobs(snapshot)
    if (not active and not waiting) or snapshot.kill_switch is not None:
        return
    tasks = signs.queued_tasks(waiting) + len(active) + signs.tasks_to_come(snapshot)
    remaining, covered = signs.remaining_seconds(snapshot), signs.queue_coverage_seconds(snapshot)
    if tasks > 2 or (remaining is not None and covered is not None and remaining <= covered):
        return
    last = "the last task of the queue " + ("is running" if active else "is waiting")
    title = last if tasks == 1 else "one more task is queued after this one" if active else "two tasks are queued"
    evidence = []
    if remaining is not None:
        held = "" if covered is None else f", the queue holds {duration(covered)}"
        evidence.append(f"{duration(remaining)} of training are left{held}")
    newest = max((*active, *waiting), key=lambda job: int(job.raw_id) if job.raw_id.isdigit() else 0)
    after = newest.array_id or newest.raw_id
    yield Finding(
        "chain-end",
        Severity.WARNING,
        title,
        subject=after,
        evidence=tuple(evidence),
        fix=signs.command(snapshot, f"launch --array 1-10 --after {after}"),
    )

"""A checkpoint that must be copied away was not: one lost file system, and months of training are gone."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Snapshot, Unknown, known
from tr11ops.units import duration

NAME = "backup-overdue"
NEEDS = ("backup", "checkpoints", "submissions", "steps")

GRACE_SECONDS = 1.5 * signs.DAY  # the copies are made once a day, and terabytes take hours
CRITICAL_SECONDS = 7 * signs.DAY


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING 36 hours after a step that the card wants copied, CRITICAL after a week. Silent where it wants none.

    The clock begins when the first step that has no copy was reached, but not before the first submission. A copy of
    which the step is not known counts for every step that was reached before it.
    """
    interval, backup = snapshot.run.operation.archive_interval, snapshot.backup
    if interval is None or isinstance(backup, Unknown):
        return
    if isinstance(snapshot.submissions, Unknown) or isinstance(snapshot.steps, Unknown):
        return
    due = due_step(snapshot, interval)
    copied = 0 if backup is None or backup.step is None else backup.step
    if due is None or copied >= due:
        return
    missing = due if backup is not None and backup.step is None else copied - copied % interval + interval
    reached, began = reached_at(snapshot, missing), signs.first_submission(snapshot)
    if backup is not None and backup.step is None and (reached is None or backup.time >= reached):
        return
    since = max((moment for moment in (began, reached) if moment is not None), default=None)
    late = 0.0 if since is None else snapshot.time - since
    if late <= GRACE_SECONDS:
        return
    last = "none was ever copied" if backup is None else f"the last copy is {duration(snapshot.time - backup.time)} old"
    step = "" if backup is None or backup.step is None else f", of step {backup.step}"
    evidence = (f"{last}{step}", *((backup.message,) if backup is not None and backup.message else ()))
    yield Finding(
        NAME,
        Severity.CRITICAL if late > CRITICAL_SECONDS else Severity.WARNING,
        f"step {due} is not copied away; copies are due for {duration(late)}",
        evidence=evidence,
        fix=signs.command(snapshot, "checkpoints list"),
    )


def due_step(snapshot: Snapshot, interval: int) -> int | None:
    """The newest step with a checkpoint that must be copied; None where there is none, or it is not known."""
    if isinstance(snapshot.checkpoints, Unknown):
        return None
    return max((step for step in snapshot.checkpoints.steps if step and step % interval == 0), default=None)


def reached_at(snapshot: Snapshot, step: int) -> float | None:
    """About when a step was trained: its checkpoint's own time, else reckoned back from the last one at this pace.

    Waits and restarts in between make the truth earlier, so a copy is never called for too soon.
    """
    if isinstance(snapshot.checkpoints, Unknown):
        return None
    for checkpoint in snapshot.checkpoints.examined:
        if checkpoint.step == step and checkpoint.created is not None:
            return checkpoint.created
    steps, pace = known(snapshot.steps, ()), signs.seconds_per_iteration(snapshot)
    if not steps or steps[-1].time is None or pace is None:
        return None
    return steps[-1].time - max(0, steps[-1].record.iteration - step) * pace

"""Nothing runs and nothing is queued, though the training is neither finished nor stopped by someone."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Snapshot, Unknown, known


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Silent unless jobs and the kill switch were really seen: absence is never concluded from silence."""
    if isinstance(snapshot.jobs, Unknown) or snapshot.kill_switch is not None:
        return
    if signs.active_jobs(snapshot) or signs.pending_jobs(snapshot):
        return
    if signs.is_finished(snapshot) or signs.life_outside(snapshot) is not None:
        return
    if isinstance(snapshot.attempts, Unknown) or signs.last_end_is_unknown(snapshot):
        return
    yield Finding(
        "down",
        Severity.CRITICAL,
        f"{snapshot.run.name} is neither running nor queued",
        evidence=tuple(_evidence(snapshot)),
        fix=signs.command(snapshot, "launch --array 1-10"),
    )


def _evidence(snapshot: Snapshot) -> Iterator[str]:
    marker = signs.last_marker(snapshot)
    if marker is not None:
        yield f"the last attempt that left word ended by {marker.reason} at iteration {marker.iteration}"
    newest = next(iter(known(snapshot.submissions, ())), None)
    if newest is None:
        yield "nothing was ever submitted from this run directory"
    elif newest.job_id is None:
        yield f"the scheduler never said whether it took submission {newest.tag}"
    else:
        yield f"the last submission was job {newest.job_id}" + (f", array {newest.array}" if newest.array else "")

"""Queued work that waits for a person: somebody, or the scheduler, holds it."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Snapshot


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """CRITICAL when nothing else of the run can run, else a warning that the chain stops after the present task."""
    idle = not signs.active_jobs(snapshot) and not signs.startable_jobs(snapshot) and snapshot.kill_switch is None
    for job in signs.pending_jobs(snapshot):
        if signs.is_held(job):
            yield Finding(
                "held",
                Severity.CRITICAL if idle else Severity.WARNING,
                f"job {job.job_id} is held ({job.reason}): it starts when it is released",
                subject=job.job_id,
                fix=signs.scheduler_command(snapshot, "scontrol release", job),
            )

"""Two jobs of this run are running at once: two trainers on one checkpoint directory is the worst case of all."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.base import JobState
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "at once"
SEVERITIES = "CRITICAL"
NAME = "two-attempts"
NEEDS = ("jobs",)


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for all of them; the fix cancels the one that started last."""
    running = sorted(
        (job for job in snapshot.active_jobs if job.state is JobState.RUNNING),
        key=lambda job: job.start_time or 0.0,
    )
    if len(running) < 2:
        return
    names = ", ".join(job.job_id for job in running)
    yield Finding(
        NAME,
        Severity.CRITICAL,
        f"{len(running)} jobs of this run are running at once: {names}",
        subject=names,
        evidence=tuple(f"{job.job_id} of {job.user}: {job.comment or 'no comment'}" for job in running),
        fix=derived.scheduler_command(snapshot, "scancel", running[-1]),
    )

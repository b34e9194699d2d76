"""A job of this run is suspended: it holds its place and does nothing until someone resumes it."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.base import JobState
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "at once"
SEVERITIES = "CRITICAL"
NAME = "suspended"
NEEDS = ("jobs",)


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for each suspended job."""
    for job in snapshot.active_jobs:
        if job.state is JobState.SUSPENDED:
            yield Finding(
                NAME,
                Severity.CRITICAL,
                f"job {job.job_id} is suspended",
                subject=job.job_id,
                fix=derived.scheduler_command(snapshot, "scontrol resume", job),
            )

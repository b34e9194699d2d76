"""Queued work that can never start as it stands: a dependency that cannot be met, a limit that cannot be kept."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Snapshot

NAME = "dead-chain"
NEEDS = ("jobs",)


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding per queued job, by the scheduler's own reason: PENDING is not waiting."""
    for job in signs.pending_jobs(snapshot):
        if signs.is_dead(job):
            evidence = (f"dependency: {job.dependency}",) if job.dependency else ()
            yield Finding(
                NAME,
                Severity.CRITICAL,
                f"job {job.job_id} can never start: {job.reason}",
                subject=job.array_id or job.raw_id,
                evidence=evidence,
                fix=signs.command(snapshot, "launch --repair"),
            )

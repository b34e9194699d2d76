"""Queued work that a person must give another request, shared by the detectors of its causes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.base import Job
from tr11ops.cluster.pending import Cause, reason_of_job
from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Snapshot


def blocked(snapshot: Snapshot, detector: str, cause: Cause, how: str, severity: Severity) -> Iterator[Finding]:
    """A finding for each array or job that waits for this cause; `how` it waits, in words."""
    jobs = {
        job.array_id or job.raw_id: job for job in signs.pending_jobs(snapshot) if reason_of_job(job).cause is cause
    }
    for number, job in jobs.items():
        yield Finding(
            detector,
            severity,
            f"job {job.job_id} waits {how}: {job.reason}",
            subject=number,
            evidence=(reason_of_job(job).meaning, way_out(job)),
            fix=signs.command(snapshot, "launch --replace"),
        )


def way_out(job: Job) -> str:
    """What a person can do for a job that waits for one, in words; "" where the reason says nothing of it."""
    number = job.array_id or job.raw_id
    replace = "correct the card, then `tr11 launch --replace`"
    cause = reason_of_job(job).cause
    if job.reason == "PartitionTimeLimit":
        return f"`scontrol update JobId={number} TimeLimit=HH:MM:SS` keeps its place in the queue; or {replace}"
    if cause is Cause.RESERVATION:
        return f"`scontrol release {number}` lets it go on without a reservation; or {replace}"
    if cause is Cause.LIMIT:
        return f"more is granted by the site, or another account or QoS is used: {replace}"
    if cause is Cause.UNKNOWN:
        return f"`scontrol show job {number}` says more"
    return ""

"""Queued work that a person must give another request, shared by the detectors of its causes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.pending_reasons import Cause, Wait, reason_of_job
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.queue.repair import way_out


def blocked(
    snapshot: Snapshot, detector: str, cause: Cause, how: str, severity: Severity
) -> Iterator[Finding]:
    """A finding for each array or job that waits for this cause; `how` it waits, in words."""
    rows = [(job, reason_of_job(job)) for job in snapshot.pending_jobs]
    jobs = {
        array_number(job): job
        for job, row in rows
        if row.cause is cause and row.wait is not Wait.PASSES
    }
    for number, job in jobs.items():
        yield Finding(
            detector,
            severity,
            f"job {job.job_id} waits {how}: {job.reason}",
            subject=number,
            evidence=(reason_of_job(job).meaning, way_out(job)),
            fix=derived.command(snapshot, "launch --replace"),
        )

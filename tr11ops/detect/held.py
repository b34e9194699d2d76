"""Queued work that waits for a person: somebody, or the scheduler, holds it, or why it waits is not known."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.pending import Cause, reason_of_job
from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Snapshot, known

NAME = "held"
NEEDS = ("jobs", "kill_switch", "pause")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """CRITICAL when nothing else of the run can run, else a warning that the chain stops after the present task.

    One finding for each array. What tr11 holds, by its own record, is released by `tr11 resume`; while a kill switch or
    a pause is in force, that is as somebody wants it: INFO.
    """
    stop = signs.stop_of(snapshot)
    idle = signs.is_idle(snapshot)
    record = {entry.job: entry for entry in known(snapshot.holds, ())}
    waiting = ((job, reason_of_job(job).cause) for job in signs.pending_jobs(snapshot))
    held = {job.array_id or job.raw_id: (job, cause) for job, cause in waiting if cause in {Cause.HOLD, Cause.UNKNOWN}}
    for number, (job, cause) in held.items():
        if cause is Cause.UNKNOWN:
            yield Finding(
                NAME,
                Severity.CRITICAL if idle else Severity.WARNING,
                f"job {job.job_id} waits for a reason that tr11 does not know: {job.reason}",
                subject=number,
                fix=signs.scheduler_command(snapshot, "scontrol show job", job),
            )
            continue
        by = record.get(number)
        release = signs.scheduler_command(snapshot, "scontrol release", job)
        yield Finding(
            NAME,
            Severity.CRITICAL if idle else Severity.INFO if by is not None and stop is not None else Severity.WARNING,
            f"job {job.job_id} is held ({job.reason}): it starts when it is released",
            subject=number,
            evidence=() if by is None else (f"by {by.who or 'tr11'}" + (f", because: {by.why}" if by.why else ""),),
            fix=release if by is None else signs.command(snapshot, "resume"),
        )

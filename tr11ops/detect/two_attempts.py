"""Two jobs of this run are running at once: two trainers on one checkpoint directory is the worst
case of all.

A task that Slurm starts beside another one of its array, because that has lost a node, looks and
gives way by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "at once; 2 minutes for the next task of the array"
SEVERITIES = "CRITICAL"
NAME = "two-attempts"
NEEDS = ("jobs",)
LOOKING_SECONDS = 120.0  # for a task to see that another one of its array trains, and to leave


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for all of them; the fix cancels the one that started last."""
    running = sorted(
        (job for job in snapshot.active_jobs if job.state is JobState.RUNNING),
        key=lambda job: job.start_time or 0.0,
    )
    running = [job for job in running if not _still_looks(snapshot, job, running[0])]
    if len(running) < 2:
        return
    names = ", ".join(job.job_id for job in running)
    yield Finding(
        NAME,
        Severity.CRITICAL,
        f"{len(running)} jobs of this run are running at once: {names}",
        subject=names,
        evidence=tuple(
            f"{job.job_id} of {job.user}: {job.comment or 'no comment'}" for job in running
        ),
        fix=derived.scheduler_command(snapshot, "scancel", running[-1]),
    )


def _still_looks(snapshot: Snapshot, job: Job, first: Job) -> bool:
    """Whether a job has just begun as the next task of the first one's array, and no trainer of it
    is seen to live.

    Where heartbeats cannot be seen it has the same time: that it trains is not concluded from not
    seeing.
    """
    if (
        job is first
        or job.array_id is None
        or job.array_id != first.array_id
        or job.start_time is None
    ):
        return False
    if derived.beats_of(snapshot, job):
        return False
    return snapshot.time - job.start_time < LOOKING_SECONDS

"""Nothing trains, and the first task waits and waits, although the nodes are the run's own: a queue
is not a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted, duration, timestamp
from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.base import Job
from tr11ops.cluster.pending_reasons import Cause, Wait, reason_of_job
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.nodes_left import usable_nodes
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.queue.repair import way_out

BOUND = "`watch.longest_queue_minutes`, also where the scheduler expects it to start later than that; 3 times that"
SEVERITIES = "WARNING, CRITICAL"
NAME = "queued-too-long"
NEEDS = ("jobs", "kill_switch", "pause", "attempts", "heartbeats", "steps")

CRITICAL_FACTOR = 3.0  # times watch.longest_queue_minutes
# Waiting for a time or for another task, not for nodes. Prefixes, as versions of Slurm add words.
OTHER_REASONS = ("BeginTime", "Dependency")
# Waiting for a task of its own array. Where none runs, Slurm has miscounted: 22.05 does so when it
# is started again while a task lives on that has lost a node, and then starts no other one ever.
BEHIND_ANOTHER = "JobArrayTaskLimit"


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING after watch.longest_queue_minutes, CRITICAL after three times that; only while
    nothing of the run runs.

    So too for jobs that wait for other jobs below a limit: it passes by itself, or shows by its age
    that it does not.

    Counted from when the task could start: its submission or release, or the end of the task before
    it. WARNING at once where the scheduler itself expects the first start later than that from now,
    or someone has set such a time.
    """
    if isinstance(snapshot.attempts, Unknown):
        return
    if derived.may_live_outside(snapshot):
        return  # it may train outside the scheduler
    if (
        snapshot.active_jobs
        or derived.stop_of(snapshot) is not None
        or derived.liveness_outside(snapshot) is not None
    ):
        return
    limit = 60.0 * snapshot.run.watch.longest_queue_minutes
    waiting = [
        (since, job)
        for job in derived.startable_jobs(snapshot)
        if not job.reason.startswith(OTHER_REASONS)
        and reason_of_job(job).wait is Wait.PASSES
        and (since := waits_since(snapshot, job)) is not None
    ]
    late = _late_start(snapshot, limit)
    oldest = min(waiting, key=lambda pair: (pair[0], pair[1].raw_id), default=None)
    if oldest is None or snapshot.time - oldest[0] <= limit:
        if late is not None:
            yield _expected_late(snapshot, late)
        return
    since, job = oldest
    waited = snapshot.time - since
    evidence = [f"reason: {job.reason or 'none given'}"]
    if late is not None:
        evidence.append(_expectation(snapshot, late))
    row = reason_of_job(job)
    if row.cause is Cause.LIMIT:
        evidence += [row.meaning, way_out(job)]
    what = "room below a limit" if row.cause is Cause.LIMIT else "nodes"
    if job.reason.startswith(BEHIND_ANOTHER):
        evidence.append(
            "no task of its array runs: the scheduler has miscounted, and starts none until they are queued again"
        )
        what = "a task of its own array, none of which runs,"
    left = usable_nodes(snapshot, job.partition)
    if left is not None and job.node_count:
        asked = counted(job.node_count, "node is", "nodes are")
        evidence.append(f"{asked} asked for, {left} of the partition are usable and not excluded")
    yield Finding(
        NAME,
        Severity.CRITICAL if waited > CRITICAL_FACTOR * limit else Severity.WARNING,
        f"nothing trains: job {job.job_id} has waited for {what} for {duration(waited)}",
        subject=array_number(job),
        evidence=tuple(evidence),
        fix=derived.command(
            snapshot, "launch --replace" if job.reason.startswith(BEHIND_ANOTHER) else "nodes list"
        ),
        since=since,
    )


def _late_start(snapshot: Snapshot, limit: float) -> Job | None:
    """The job that is expected to start first, where that is more than `limit` seconds away; None
    where one may start earlier, or the scheduler does not say of one when it will.
    """
    first = [
        job
        for job in derived.startable_jobs(snapshot)
        if reason_of_job(job).wait is Wait.PASSES
        and not job.reason.startswith(("Dependency", BEHIND_ANOTHER))
    ]
    starts = [job.start_time for job in first if job.start_time is not None]
    if not first or len(starts) < len(first) or min(starts) - snapshot.time <= limit:
        return None
    return min(first, key=lambda job: (job.start_time or 0.0, job.raw_id))


def _expectation(snapshot: Snapshot, job: Job) -> str:
    wait = duration((job.start_time or snapshot.time) - snapshot.time)
    if job.reason.startswith("BeginTime"):
        return f"it may not start before its time, which is in {wait}"
    return f"the scheduler expects job {job.job_id} to start in {wait}, should all before it use their whole time"


def _expected_late(snapshot: Snapshot, job: Job) -> Finding:
    start = timestamp(job.start_time or snapshot.time, UTC)
    fix = derived.command(snapshot, "nodes list")
    if job.reason.startswith("BeginTime") and snapshot.scheduler == "slurm":
        fix = f"scontrol update JobId={array_number(job)} StartTime=now"
    return Finding(
        NAME,
        Severity.WARNING,
        f"nothing trains: job {job.job_id} is not expected to start before {start}",
        subject=array_number(job),
        evidence=(f"reason: {job.reason or 'none given'}", _expectation(snapshot, job)),
        fix=fix,
    )


def waits_since(snapshot: Snapshot, job: Job) -> float | None:
    """When the job could start at the earliest; None where its submission is not known."""
    if job.submit_time is None:
        return None
    ends = [
        other.end_time
        for other in known(snapshot.jobs, ())
        if other.state.is_final and other.end_time is not None
    ]
    ends += [attempt.changed for attempt in known(snapshot.attempts, ())]
    # not every answer of the scheduler tells since when it may start
    released = snapshot.operation.holds_changed
    return max([job.submit_time, job.eligible_time or 0.0, released or 0.0, *ends])

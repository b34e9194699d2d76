"""Nothing trains, and the first task waits and waits, although the nodes are the run's own: a queue is not a reason."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration
from tr11ops.cluster.base import Job
from tr11ops.cluster.parts import array_number
from tr11ops.cluster.pending_reasons import Cause, Wait, reason_of_job
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.nodes_left import usable_nodes
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.queue.repair import way_out

BOUND = "`watch.longest_queue_minutes`; 3 times that"
SEVERITIES = "WARNING, CRITICAL"
NAME = "queued-too-long"
NEEDS = ("jobs", "kill_switch", "pause", "attempts", "heartbeats", "steps")

CRITICAL_FACTOR = 3.0  # times watch.longest_queue_minutes
# Waiting for a time or for another task, not for nodes. Prefixes, as versions of Slurm add words.
OTHER_REASONS = ("BeginTime", "Dependency")
# Waiting for a task of its own array. Where none runs, Slurm has miscounted: 22.05 does so when it is started again
# while a task lives on that has lost a node, and then starts no other one ever.
BEHIND_ANOTHER = "JobArrayTaskLimit"


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING after watch.longest_queue_minutes, CRITICAL after three times that; only while nothing of the run runs.

    So too for jobs that wait for other jobs below a limit: it passes by itself, or shows by its age that it does not.

    Counted from when the task could start: its submission or release, or the end of the task before it.
    """
    if isinstance(snapshot.attempts, Unknown):
        return
    if derived.may_live_outside(snapshot):
        return  # it may train outside the scheduler
    if snapshot.active_jobs or derived.stop_of(snapshot) is not None or derived.liveness_outside(snapshot) is not None:
        return
    limit = snapshot.run.operation.longest_queue_seconds
    waiting = [
        (since, job)
        for job in derived.startable_jobs(snapshot)
        if not job.reason.startswith(OTHER_REASONS)
        and reason_of_job(job).wait is Wait.PASSES
        and (since := waits_since(snapshot, job)) is not None
    ]
    if not waiting:
        return
    since, job = min(waiting, key=lambda pair: (pair[0], pair[1].raw_id))
    waited = snapshot.time - since
    if waited <= limit:
        return
    evidence = [f"reason: {job.reason or 'none given'}"]
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
        evidence.append(f"{job.node_count} nodes are asked for, {left} of the partition are usable and not excluded")
    yield Finding(
        NAME,
        Severity.CRITICAL if waited > CRITICAL_FACTOR * limit else Severity.WARNING,
        f"nothing trains: job {job.job_id} has waited for {what} for {duration(waited)}",
        subject=array_number(job),
        evidence=tuple(evidence),
        fix=derived.command(snapshot, "launch --replace" if job.reason.startswith(BEHIND_ANOTHER) else "nodes list"),
    )


def waits_since(snapshot: Snapshot, job: Job) -> float | None:
    """When the job could start at the earliest; None where its submission is not known."""
    if job.submit_time is None:
        return None
    ends = [other.end_time for other in known(snapshot.jobs, ()) if other.state.is_final and other.end_time is not None]
    ends += [attempt.changed for attempt in known(snapshot.attempts, ())]
    released = snapshot.holds_changed  # not every answer of the scheduler tells since when it may start
    return max([job.submit_time, job.eligible_time or 0.0, released or 0.0, *ends])

"""Queued work that a limit of the partition, account or QoS keeps from starting: used up, or below
what it asks.

Also work that someone has moved to a partition which has not got the nodes: Slurm then still says
that it waits.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.pending_reasons import Cause, Wait, reason_of_job
from tr11ops.detect.blocked import blocked
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.placement import misplaced
from tr11ops.observe.snapshot import Snapshot

BOUND = "the scheduler's reason"
SEVERITIES = "WARNING, CRITICAL when nothing else can run"
NAME = "limit-reached"
NEEDS = ("jobs", "nodes", "kill_switch", "pause")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for each array: CRITICAL when nothing else of the run can run, else a WARNING."""
    severity = Severity.CRITICAL if derived.is_idle(snapshot) else Severity.WARNING
    yield from blocked(snapshot, NAME, Cause.LIMIT, "over a limit", severity)
    told = {
        array_number(job)
        for job in snapshot.pending_jobs
        if reason_of_job(job).cause is Cause.LIMIT
    }
    wrong = {
        array_number(job): job
        for job in snapshot.pending_jobs
        if reason_of_job(job).wait is Wait.PASSES
    }
    for number, job in wrong.items():
        why = misplaced(snapshot, job)
        if why and number not in told:
            yield Finding(
                NAME,
                severity,
                f"job {job.job_id} can never start in partition {job.partition}",
                subject=number,
                evidence=(
                    why,
                    f"`scontrol update JobId={number} Partition=NAME` keeps its place in the queue",
                ),
                fix=derived.command(snapshot, "launch --replace"),
            )

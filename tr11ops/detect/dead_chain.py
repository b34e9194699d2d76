"""Queued work that can never start as it stands: a dependency that cannot be met, a request that cannot be served."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.base import Job
from tr11ops.cluster.parts import array_number
from tr11ops.cluster.pending_reasons import Cause, reason_of_job
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.nodes_left import usable_nodes
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "the scheduler's reason"
SEVERITIES = "CRITICAL"
NAME = "dead-chain"
NEEDS = ("jobs",)
WANT_OF_NODES = "nodes"  # as `fault`: it asks for more than can be used


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding per queued job, by the scheduler's own reason: PENDING is not waiting."""
    for job in snapshot.pending_jobs:
        row = reason_of_job(job)
        if row.cause is Cause.REQUEST:
            short = _is_for_want_of_nodes(snapshot, job)
            evidence = (row.meaning, *((f"dependency: {job.dependency}",) if job.dependency else ()))
            yield Finding(
                NAME,
                Severity.CRITICAL,
                f"job {job.job_id} can never start: {job.reason}",
                subject=array_number(job),
                evidence=evidence,
                fix=_with_fewer_spares(snapshot, job) or derived.command(snapshot, "launch --repair"),
                fault=WANT_OF_NODES if short else "",
            )


def _is_for_want_of_nodes(snapshot: Snapshot, job: Job) -> bool:
    """Whether it asks for more nodes than can be used: the scheduler's word for it is that it can never start."""
    usable = usable_nodes(snapshot, job.partition)
    return job.reason.startswith("BadConstraints") and usable is not None and job.node_count > usable


def _with_fewer_spares(snapshot: Snapshot, job: Job) -> str:
    """The command that queues it with as many spares as there are; "" where that is not what it lacks, or none fits."""
    usable, training = usable_nodes(snapshot, job.partition), snapshot.run.nodes
    if not _is_for_want_of_nodes(snapshot, job) or usable is None or training is None or training > usable:
        return ""
    return derived.command(snapshot, f"launch --replace --set slurm.spare_nodes={usable - training}")

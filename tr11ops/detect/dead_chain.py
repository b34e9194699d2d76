"""Queued work that can never start as it stands: a dependency that cannot be met, a request that
cannot be served.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.pending_reasons import Cause, reason_of_job
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.nodes_left import fewer_spares, usable_nodes
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
            usable = usable_nodes(snapshot, job.partition)
            is_short = (
                job.reason.startswith("BadConstraints")
                and usable is not None
                and job.node_count > usable
            )
            spares = ""
            if is_short:
                spares = fewer_spares(snapshot, usable)
            evidence = (
                row.meaning,
                *((f"dependency: {job.dependency}",) if job.dependency else ()),
            )
            yield Finding(
                NAME,
                Severity.CRITICAL,
                f"job {job.job_id} can never start: {job.reason}",
                subject=array_number(job),
                evidence=evidence,
                fix=derived.command(
                    snapshot, f"launch --replace {spares}" if spares else "launch --repair"
                ),
                fault=WANT_OF_NODES if is_short else "",
            )

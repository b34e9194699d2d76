"""A node of a running job is down. Without its first node a job has no script left: it stays RUNNING for ever."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import known
from tr11ops.cluster.base import JobState
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.lost_host import batch_host
from tr11ops.observe.snapshot import Snapshot

BOUND = "at once"
SEVERITIES = "WARNING, CRITICAL with the batch script's node"
NAME = "node-lost"
NEEDS = ("jobs", "nodes")

DEAD_STATES = frozenset({"down", "not_responding", "fail"})


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for each lost node; CRITICAL for the node that runs the batch script."""
    nodes = {node.name: node for node in known(snapshot.nodes, ())}
    for job in snapshot.active_jobs:
        if job.state is JobState.COMPLETING:  # it gives back its nodes: the list holds those that are still to come
            continue
        lost = [name for name in job.nodes if name in nodes and nodes[name].states & DEAD_STATES]
        host = batch_host(snapshot, job) or next(iter(job.nodes), "")
        for name in sorted(lost, key=lambda name: name != host):
            reason = f" ({nodes[name].reason})" if nodes[name].reason else ""
            yield Finding(
                NAME,
                Severity.CRITICAL if name == host else Severity.WARNING,
                f"job {job.job_id} has lost {name}" + (", which ran its batch script" if name == host else ""),
                subject=job.job_id,
                identity=(name,),
                evidence=(f"{name}: {'+'.join(sorted(nodes[name].states))}{reason}",),
                fix=derived.scheduler_command(snapshot, "scancel", job)
                if name == host
                else derived.command(snapshot, "logs"),
            )

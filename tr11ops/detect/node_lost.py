"""A node of a running job is down. Without its first node a job has no script left: it stays RUNNING for ever."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.cluster.base import JobState
from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.zombie import batch_host
from tr11ops.snapshot import Snapshot, known

NAME = "node-lost"
NEEDS = ("jobs", "nodes")

DEAD_STATES = frozenset({"down", "not_responding", "fail"})


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding per job; CRITICAL when the node that runs the batch script is among the lost ones."""
    nodes = {node.name: node for node in known(snapshot.nodes, ())}
    for job in signs.active_jobs(snapshot):
        if job.state is JobState.COMPLETING:  # it gives back its nodes: the list holds those that are still to come
            continue
        lost = [name for name in job.nodes if name in nodes and nodes[name].states & DEAD_STATES]
        if not lost:
            continue
        zombie = (batch_host(snapshot, job) or job.nodes[0]) in lost
        named = ", ".join(lost[:4]) + (" ..." if len(lost) > 4 else "")
        title = f"job {job.job_id} has lost {named}" + (", which ran its batch script" if zombie else "")
        evidence = tuple(
            f"{name}: {'+'.join(sorted(nodes[name].states))}"
            + (f" ({nodes[name].reason})" if nodes[name].reason else "")
            for name in lost[:4]
        )
        severity = Severity.CRITICAL if zombie else Severity.WARNING
        fix = signs.scheduler_command(snapshot, "scancel", job) if zombie else signs.command(snapshot, "logs")
        yield Finding(NAME, severity, title, subject=job.job_id, evidence=evidence, fix=fix)

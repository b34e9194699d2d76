"""Whether a queued job can be placed at all where it is queued, by the nodes and partitions as they
are now. Pure.

The scheduler's reason does not tell it of a job that also waits for another: Slurm lets a queued
task be moved to any partition, and goes on to say that it waits for its turn.
"""

from __future__ import annotations

from msgspec.structs import replace

from tr11ops.base.observed import known
from tr11ops.base.units import counted
from tr11ops.cluster.base import Job, Node
from tr11ops.cluster.capacity import NodeNeed, lacking, why_no_room
from tr11ops.cluster.pending_reasons import PARTITION_CLOSED, reason_of
from tr11ops.observe.snapshot import Snapshot

NOT_ASKED_SINCE = "None"  # Slurm's word for a job that it has not looked at yet


def with_reasons_of_now(jobs: tuple[Job, ...], nodes: tuple[Node, ...]) -> tuple[Job, ...]:
    """The jobs, those without a reason of which one says that its partition is closed though it is
    open by now.

    Slurm gives the reason of its last attempt to start a job, which may be minutes old.
    """
    are_open = {
        name for node in nodes for name in node.partitions if name not in node.shut_partitions
    }
    return tuple(
        replace(job, reason=NOT_ASKED_SINCE)
        if reason_of(job.reason) is PARTITION_CLOSED and are_open.intersection(_partitions(job))
        else job
        for job in jobs
    )


def is_shut(snapshot: Snapshot, job: Job) -> bool:
    """Whether every partition that the job is queued in starts nothing now; not where one of them
    is not known.
    """
    names = _partitions(job)
    return bool(names) and all(
        (nodes := _nodes_of(snapshot, name)) and all(name in node.shut_partitions for node in nodes)
        for name in names
    )


def misplaced(snapshot: Snapshot, job: Job) -> str:
    """Why no partition that the job is queued in could ever start it, in words; "" where one could,
    or is not known.
    """
    return why_no_room(job, known(snapshot.nodes, ()))


def too_few_usable(snapshot: Snapshot, job: Job) -> str:
    """Why no partition that the job is queued in could start it as its nodes are now, in words; ""
    where one could.

    Nodes at work count, as they will be free; so does what is not known: a node that the scheduler
    itself cannot judge, a partition without nodes. What is down, drained, silent or excluded does
    not.
    """
    excluded = {entry.node for entry in known(snapshot.exclusions, ())} | set(job.excluded)
    found = []
    for name in _partitions(job):
        nodes = _nodes_of(snapshot, name)
        lacks = lacking(NodeNeed(gpus=job.gpus_per_node), nodes)
        fits = [node for node in nodes if node.name not in lacks]
        usable = [
            node
            for node in fits
            if (node.is_usable or node.is_unknown) and node.name not in excluded
        ]
        if not nodes or job.node_count <= len(usable):
            return ""
        total = counted(len(fits), "node")
        found.append(
            f"{len(usable)} of {total} of {name} can be used, it asks for {job.node_count}"
        )
    return "; ".join(found)


def _partitions(job: Job) -> tuple[str, ...]:
    return tuple(filter(None, job.partition.split(",")))


def _nodes_of(snapshot: Snapshot, partition: str) -> tuple[Node, ...]:
    return tuple(node for node in known(snapshot.nodes, ()) if partition in node.partitions)

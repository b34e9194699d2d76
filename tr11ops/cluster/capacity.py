"""What a node could give a request when all is well with it, whatever its state is at this moment.
Pure.

A scheduler that is asked whether it would take a request answers for this moment: Slurm refuses
what needs a drained node, and queues the same request. Whether a request can ever start is judged
here, of the nodes as they are built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from tr11ops.base.units import counted
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.cluster.pending_reasons import Wait, reason_of_job
from trainer.contract.record import Record

_FEATURES = re.compile(r"[\w.:-]+(&[\w.:-]+)*|[\w.:-]+(\|[\w.:-]+)*")


class NodeNeed(Record):
    """What a request asks of each of its nodes. `memory_megabytes` 0: no more than the site gives
    by itself.
    """

    gpus: int = 0
    cpus: int = 1
    memory_megabytes: int = 0
    constraint: str | None = None


class Lack(StrEnum):
    """What a node has too little of."""

    GPUS = "GPUs"
    CORES = "cores"
    MEMORY = "MB of memory"
    FEATURES = "features"


def lacking(need: NodeNeed, nodes: Iterable[Node]) -> dict[str, Lack]:
    """The nodes that could not serve the request even when all is well with them, each with what it
    lacks.

    What a node does not tell (0 cores, 0 memory, GPUs that do not answer, no feature on any node)
    is not held against it, nor a constraint with counts or brackets: the scheduler itself has the
    last word.
    """
    listed = tuple(nodes)
    wanted = _features(need.constraint, listed)
    found = {}
    for node in listed:
        if node.gpus < need.gpus and not node.gpu_fault:
            found[node.name] = Lack.GPUS
        elif 0 < node.cpus < need.cpus:
            found[node.name] = Lack.CORES
        elif 0 < node.memory_megabytes < need.memory_megabytes:
            found[node.name] = Lack.MEMORY
        elif wanted and not any(one <= node.features for one in wanted):
            found[node.name] = Lack.FEATURES
    return found


def why_no_room(job: Job, nodes: Iterable[Node]) -> str:
    """Why no partition that a job is queued in could ever start it, in words; "" where one could,
    or is not known.

    Nodes count as they are built, whatever their state is now.
    """
    listed = tuple(nodes)
    found = []
    for name in filter(None, job.partition.split(",")):
        there = [node for node in listed if name in node.partitions]
        fits = len(there) - len(lacking(NodeNeed(gpus=job.gpus_per_node), there))
        if not there or job.node_count <= fits:
            return ""
        with_gpus = ""
        if job.gpus_per_node:
            with_gpus = f" with {counted(job.gpus_per_node, 'GPU')}"
        found.append(
            f"it asks for {counted(job.node_count, 'node')}{with_gpus}, partition {name} has {fits}"
        )
    return "; ".join(found)


def with_room(jobs: Iterable[Job], nodes: Iterable[Node]) -> tuple[Job, ...]:
    """The queued jobs that ask for a number of nodes which they can get one day, also those that
    are held.
    """
    listed = tuple(nodes)
    kinds: dict[tuple[object, ...], bool] = {}  # thousands may ask for the same
    found = []
    for job in jobs:
        kind = (
            job.state,
            job.reason,
            job.priority == 0,
            job.partition,
            job.node_count,
            job.gpus_per_node,
        )
        if kind not in kinds:
            can_start = job.state is JobState.PENDING and reason_of_job(job).wait is not Wait.NEVER
            is_too_large = bool(listed) and job.node_count > len(listed)  # whatever its partition
            kinds[kind] = (
                can_start
                and job.node_count > 0
                and not is_too_large
                and not why_no_room(job, listed)
            )
        if kinds[kind]:
            found.append(job)
    return tuple(found)


def _features(constraint: str | None, nodes: tuple[Node, ...]) -> tuple[frozenset[str], ...]:
    """The sets of features of which a node must have one whole; none where the constraint is not
    judged here.
    """
    if (
        not constraint
        or not any(node.features for node in nodes)
        or not _FEATURES.fullmatch(constraint)
    ):
        return ()
    if "|" in constraint:
        return tuple(frozenset({name}) for name in constraint.split("|"))
    return (frozenset(constraint.split("&")),)

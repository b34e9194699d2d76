"""The health checks for any job, also one that tr11 knows nothing of: which nodes of an allocation
are good now.

Each node is looked at in a step of the job, as before a launch of our own. Nothing is written down,
and nothing is excluded anywhere by it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from threading import Semaphore

from msgspec.structs import replace

from tr11ops.health.base import CheckOutcome, summary, worst
from tr11ops.nodes.check import (
    PROCESSES_AT_ONCE,
    NodeCheck,
    ProcessCheck,
    Way,
    ask_nodes,
    without_failing_checks,
)
from tr11ops.nodes.health_job import HealthRequest
from trainer.contract.record import Record

_COUNT = re.compile(r"(?:[^,]*:)?(\d+)")
_UNKNOWN = CheckOutcome.UNKNOWN
CHECK_SECONDS = 30.0  # for each check on a node
GPU_VARIABLES = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")


class JobChecks(Record):
    """What is asked of each node. `gpus`: how many of them have to answer. `folder`: one that each
    node must be able to write, None for no such check. `scripts` and `skip`: as
    `resilience.check_scripts` and `skip_checks` of a card.
    """

    gpus: int = 0
    folder: Path | None = None
    scripts: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


class JobNodes(Record):
    """What came out for the nodes of a job, in the order of its allocation."""

    results: tuple[NodeCheck, ...]

    @property
    def good(self) -> tuple[str, ...]:
        """The nodes that answered, and on which no check failed."""
        return self._of(CheckOutcome.FINE, CheckOutcome.WARNING)

    @property
    def bad(self) -> tuple[str, ...]:
        """The nodes with a check that failed there, and not everywhere."""
        return self._of(CheckOutcome.BAD)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The nodes that did not answer, or of which no check could tell anything."""
        return self._of(CheckOutcome.UNKNOWN)

    def _of(self, *outcomes: CheckOutcome) -> tuple[str, ...]:
        return tuple(entry.node for entry in self.results if entry.result in outcomes)


def gpus_of_job(environment: Mapping[str, str]) -> int:
    """How many GPUs the job has on each node, by Slurm's own variables; 0 where they name none.

    SLURM_GPUS_PER_NODE is what was asked for ("8", "a100:8"), SLURM_GPUS_ON_NODE what this node has
    of the job.
    """
    for name in GPU_VARIABLES:
        match = _COUNT.fullmatch(environment.get(name, ""))
        if match is not None:
            return int(match[1])
    return 0


def check_job_nodes(
    nodes: Sequence[str],
    wanted: JobChecks,
    job_id: str,
    timeout: float,
    progress: Callable[[NodeCheck], None],
) -> JobNodes:
    """Check the nodes at once; `progress` gets each result as it comes. One that does not answer
    within `timeout` seconds is unknown.

    `job_id`: the allocation in which Slurm starts the checks; "" where this machine plays the nodes.
    """
    slots = Semaphore(PROCESSES_AT_ONCE)

    def start(way: Way) -> ProcessCheck:
        request = HealthRequest(
            node=way.node,
            gpus=wanted.gpus,
            workers=max(1, wanted.gpus),
            folder=str(wanted.folder) if wanted.folder else None,
            controller_time=time.time(),
            seconds=min(CHECK_SECONDS, timeout),
            scripts=wanted.scripts,
            skip=wanted.skip,
            sweeps=False,
        )
        return ProcessCheck(way, request, slots)

    planned = [Way(name, inside=job_id) for name in nodes]
    answers = ask_nodes(planned, start, timeout, progress)
    return JobNodes(judged(answers, are_machines=bool(job_id)))


def judged(answers: Sequence[NodeCheck], are_machines: bool = True) -> tuple[NodeCheck, ...]:
    """The results as a launch takes them: what no node could be asked is held against none. Pure.

    Where the nodes are machines of their own they are compared: one that could not be asked what
    others answered is unknown, and so is one that failed what fails everywhere.
    """
    seen = tuple(
        replace(entry, result=worst(entry.checks), why=summary(entry.checks))
        if entry.checks
        else entry
        for entry in answers
    )
    if not are_machines:
        return seen
    made = {one.name for entry in seen for one in entry.checks if one.result is not _UNKNOWN}
    together = zip(seen, without_failing_checks(seen), strict=True)
    return tuple(_compared(before, after, made) for before, after in together)


def _compared(before: NodeCheck, after: NodeCheck, made: Collection[str]) -> NodeCheck:
    """A node beside the others: `after` what fails everywhere is held against none; `made` are the
    checks that some node could answer.
    """
    if after.result in {CheckOutcome.BAD, _UNKNOWN}:
        return after
    if before != after:
        return replace(after, result=_UNKNOWN)
    alone = [one for one in after.checks if one.result is _UNKNOWN and one.name in made]
    if not alone:
        return after
    why = f"{alone[0].name}, which other nodes answered: {alone[0].why}"
    return replace(after, result=_UNKNOWN, why=why)

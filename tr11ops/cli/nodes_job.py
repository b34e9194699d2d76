"""`tr11 nodes check` without a run: the nodes of the job around it, whatever job that is."""

from __future__ import annotations

import os
from enum import StrEnum
from functools import partial
from pathlib import Path

from tr11ops.agent.allocation import Allocation, read_allocation
from tr11ops.base.errors import HostlistError, WrongUsage
from tr11ops.base.units import counted
from tr11ops.cli.common import require_file
from tr11ops.cli.nodes_check import SCHEMA, result_values, show_checks
from tr11ops.cli.progress import node_progress
from tr11ops.cli.runner import Outcome
from tr11ops.cluster.arrays import compress, expand
from tr11ops.health.registry import NAMES
from tr11ops.nodes.check import NodeCheck
from tr11ops.nodes.job_check import JobChecks, JobNodes, check_job_nodes, gpus_of_job
from trainer.contract.errors import NEEDS_PERSON, UNOBSERVED
from trainer.contract.record import Record


class Printed(StrEnum):
    """Which nodes `--print` gives."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"


class JobQuestion(Record):
    """What was typed. `gpus`: how many each node must have, None for as many as the job has there.
    `need`: how many good nodes are enough, None for all of them. `printed`: the host list that is
    all of stdout, None for the table.
    """

    nodes: tuple[str, ...] = ()
    gpus: int | None = None
    folder: Path | None = None
    scripts: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    need: int | None = None
    printed: Printed | None = None
    timeout: float = 120.0

    @property
    def words(self) -> tuple[str, ...]:
        """The options among these that are about a job's nodes alone."""
        given = {
            "--print": self.printed is not None,
            "--need": self.need is not None,
            "--gpus": self.gpus is not None,
            "--script": bool(self.scripts),
            "--skip": bool(self.skip),
            "--folder": self.folder is not None,
        }
        return tuple(name for name, is_given in given.items() if is_given)


def check_job(question: JobQuestion) -> Outcome:
    """Check the nodes of the job around this process. Raises WrongUsage outside a job."""
    allocation = _allocation()
    nodes = _chosen(allocation, question)
    checks = _usable(question)
    on_slurm = allocation.kind == "slurm"
    with node_progress("checking nodes", len(nodes)) as done:

        def advance(_: NodeCheck) -> None:
            done("")  # the table says it, or the notes

        job_id = allocation.job_id if on_slurm else ""
        found = check_job_nodes(nodes, checks, job_id, timeout=question.timeout, progress=advance)
    document = {
        "schema": SCHEMA,
        "job": allocation.label,
        "gpus_per_node": checks.gpus,
        "nodes": [result_values(entry) for entry in found.results],
        "good": found.good,
        "bad": found.bad,
        "unknown": found.unknown,
    }
    notes = [_count(found, question.need)]
    code = _exit_code(found, question.need)
    if question.printed is None:
        screen = partial(show_checks, found.results)
        return Outcome(document, notes=notes, exit_code=code, screen=screen)
    notes = [*_worse(found), *notes]
    return Outcome(document, _host_list(found, question), notes=notes, exit_code=code)


def _allocation() -> Allocation:
    try:
        return read_allocation(os.environ, None)
    except RuntimeError:
        raise WrongUsage(
            "there is no job around this command (SLURM_JOB_ID is not set): call it in a batch script or below "
            "`salloc`; the nodes of a run are checked with --run CARD"
        ) from None
    except HostlistError as error:
        raise WrongUsage(f"SLURM_JOB_NODELIST: {error}") from None


def _chosen(allocation: Allocation, question: JobQuestion) -> tuple[str, ...]:
    """The nodes that were typed, in the job's order; all of them where none were. Raises WrongUsage."""
    try:
        typed = {name for text in question.nodes for name in expand(text)}
    except HostlistError as error:
        raise WrongUsage(f"NODE: {error}") from None
    foreign = sorted(typed - set(allocation.nodes))
    if foreign:
        raise WrongUsage(
            f"NODE: {compress(foreign)} is not among the nodes of job {allocation.label}: {compress(allocation.nodes)}"
        )
    nodes = tuple(name for name in allocation.nodes if not typed or name in typed)
    if question.need is not None and question.need > len(nodes):
        raise WrongUsage(
            f"--need {question.need}: only {counted(len(nodes), 'node is', 'nodes are')} there to be checked"
        )
    return nodes


def _usable(question: JobQuestion) -> JobChecks:
    """The checks to make, once it is known that what they name is there. Raises WrongUsage."""
    own = [f"script:{Path(one).name}" for one in question.scripts]
    unknown = sorted(set(question.skip) - {*NAMES, *own})
    if unknown:
        raise WrongUsage(
            f"--skip {unknown[0]}: no such check; there are {', '.join([*NAMES, *own])}"
        )
    scripts = []
    for name in question.scripts:
        path = Path(name).absolute()
        require_file(path, "--script")
        if not os.access(path, os.X_OK):
            raise WrongUsage(f"--script {name}: it may not be run: chmod +x {name}")
        scripts.append(str(path))
    folder = None
    if question.folder is not None:
        folder = question.folder.absolute()
        if not folder.is_dir():
            raise WrongUsage(f"--folder {folder}: there is no such folder here")
    gpus = question.gpus
    if gpus is None:
        gpus = gpus_of_job(os.environ)
    return JobChecks(gpus=gpus, folder=folder, scripts=tuple(scripts), skip=question.skip)


def _exit_code(found: JobNodes, need: int | None) -> int:
    if need is None:
        if found.bad:
            return NEEDS_PERSON
        if found.unknown:
            return UNOBSERVED
        return 0
    if len(found.good) >= need:
        return 0
    if len(found.good) + len(found.unknown) >= need:
        return UNOBSERVED
    return NEEDS_PERSON


def _host_list(found: JobNodes, question: JobQuestion) -> list[str]:
    """The list that --print asks for: nothing where there are no such nodes, or fewer good ones
    than needed.
    """
    nodes: tuple[str, ...] = getattr(found, str(question.printed))
    if question.printed is Printed.GOOD and question.need is not None:
        nodes = nodes[: question.need]
        if len(nodes) < question.need:
            return []
    if not nodes:
        return []
    return [compress(nodes)]


def _worse(found: JobNodes) -> list[str]:
    return [
        f"{entry.node}: {entry.result}: {entry.why}"
        for entry in found.results
        if entry.node not in found.good
    ]


def _count(found: JobNodes, need: int | None) -> str:
    needed = f", {need} needed" if need is not None else ""
    return (
        f"{counted(len(found.results), 'node')}{needed}: {len(found.good)} good, {len(found.bad)} bad, "
        f"{len(found.unknown)} unknown"
    )

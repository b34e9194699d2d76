"""The health checks of `tr11 nodes check` and `tr11 nodes include`: starting them, their progress,
their record.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING, Any

from tr11ops.cli.common import is_terminal, say
from tr11ops.cli.nodes_view import NodesContext
from tr11ops.cluster.passed_options import options_of
from tr11ops.cluster.sbatch_script import code_root
from tr11ops.health.base import CheckOutcome
from tr11ops.nodes import check as checking
from tr11ops.nodes.health_job import HealthRequest
from tr11ops.rundir.exclusions import record_check
from trainer.contract.sharing import make_shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from tr11ops.cluster.base import Node
    from tr11ops.nodes.check import Answering, NodeCheck, Way


def check_them(
    nodes_context: NodesContext, names: Sequence[str], timeout: float
) -> tuple[NodeCheck, ...]:
    """Check nodes at once, say how it goes, and keep the results in the journal. Nothing is left
    running.
    """
    folder = shared_folder(nodes_context)
    on_slurm = nodes_context.scheduler.name == "slurm"
    planned = _planned(nodes_context, names)
    try:
        with _progress(len(names)) as advance:
            results = checking.check_nodes(
                planned,
                _starter(nodes_context, folder, on_slurm),
                timeout,
                advance,
                are_machines=on_slurm,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what a job still writes is left behind
    if nodes_context.directory.exists:
        for entry in results:
            worse = [
                {"name": one.name, "result": str(one.result), "why": one.why}
                for one in entry.checks
                if one.result is not CheckOutcome.FINE
            ]
            record_check(
                nodes_context.directory,
                entry.node,
                result=str(entry.result),
                why=entry.why,
                owner=nodes_context.user,
                checks=worse,
            )
    return results


def never_checked(nodes_context: NodesContext, names: Sequence[str]) -> tuple[NodeCheck, ...]:
    """The nodes that cannot be checked now, by what the scheduler says of them; nothing is started."""
    planned = _planned(nodes_context, names)
    return tuple(
        checking.NodeCheck(way.node, CheckOutcome.UNKNOWN, way.never)
        for way in planned
        if way.never
    )


def _planned(nodes_context: NodesContext, names: Sequence[str]) -> tuple[Way, ...]:
    # without Slurm the nodes are this machine, whatever runs on them
    jobs = nodes_context.jobs if nodes_context.scheduler.name == "slurm" else ()
    return checking.ways(names, nodes_context.nodes, jobs, nodes_context.user)


def result_values(entry: NodeCheck) -> dict[str, Any]:
    """One node's result for --json."""
    return {
        "node": entry.node,
        "result": str(entry.result),
        "why": entry.why,
        "checks": [
            {"name": one.name, "result": str(one.result), "why": one.why} for one in entry.checks
        ],
    }


def shared_folder(nodes_context: NodesContext) -> Path:
    """A folder that the nodes see, made for one command."""
    folder = planned_folder(nodes_context)
    make_shared(folder)
    return folder


def planned_folder(nodes_context: NodesContext) -> Path:
    """Where it would be: in the run directory, or here where the run has none yet."""
    name = f"health-{secrets.token_hex(4)}"
    if nodes_context.directory.exists:
        return nodes_context.directory.paths.state / name
    return Path.cwd() / f".tr11-{name}"


def free_nodes(
    nodes_context: NodesContext, typed: Sequence[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """The nodes that a job can be given to, and the others with the reason."""
    names = nodes_context.resolve(typed) or tuple(
        node.name for node in nodes_context.partition_nodes
    )
    planned = _planned(nodes_context, names)
    left = [
        (way.node, way.never or f"busy with our job {way.inside}")
        for way in planned
        if way.never or way.inside
    ]
    return [way.node for way in planned if not way.never and not way.inside], left


def job_settings(
    nodes_context: NodesContext, folder: Path, node: Node | None = None
) -> checking.JobSettings:
    """How a job is submitted: on this node, or on several of the run's, with the GPUs that each of
    them has.
    """
    slurm, nodes = (
        nodes_context.card.slurm,
        nodes_context.partition_nodes if node is None else (node,),
    )
    partition = slurm.partition or (
        nodes_context.partition.name if nodes_context.partition else None
    )
    if node is not None and partition not in node.partitions:
        partition = None
        if node.partitions:
            partition = node.partitions[0]
    return checking.JobSettings(
        folder=folder,
        gpus=min([slurm.gpus_per_node, *(each.gpus for each in nodes)]),
        partition=partition,
        account=slurm.account,
        quality_of_service=slurm.quality_of_service,
        reservation=slurm.reservation,
        constraint=slurm.constraint,
        options=options_of(slurm.options),
        code_root=code_root(),
    )


def _starter(
    nodes_context: NodesContext, folder: Path, on_slurm: bool
) -> Callable[[Way], Answering]:
    card, nodes = nodes_context.card, {node.name: node for node in nodes_context.nodes}
    ends, slots = checking.EndedJobs(nodes_context.scheduler), Semaphore(checking.PROCESSES_AT_ONCE)

    def start(way: Way) -> Answering:
        node = nodes.get(way.node)
        gpus = card.slurm.gpus_per_node
        if on_slurm:
            if node:
                gpus = min(gpus, node.gpus)
            else:
                gpus = 0
        request = HealthRequest(
            node=way.node,
            inside=way.inside,
            gpus=gpus,
            workers=card.slurm.workers,
            folder=str(folder),
            controller_time=time.time() if way.inside or not on_slurm else None,
            seconds=card.resilience.check_seconds,
            scripts=tuple(one.model_dump() for one in card.resilience.check_scripts),
            skip=tuple(card.resilience.skip_checks),
        )
        if way.inside or not on_slurm:
            return checking.ProcessCheck(way, request, code_root(), slots)
        settings = job_settings(nodes_context, folder, node)
        return checking.submit_check(way, request, settings, nodes_context.scheduler, ends)

    return start


@contextmanager
def _progress(total: int) -> Iterator[Callable[[NodeCheck], None]]:
    """A bar on a terminal; elsewhere a line for each node that is not fine."""
    if not is_terminal():
        yield lambda entry: say(f"{entry.node}: {entry.result}") if entry.result != "fine" else None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("checking nodes"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, last="")
        yield lambda entry: bar.update(task, advance=1, last=f"{entry.node} {entry.result}")

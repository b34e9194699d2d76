"""What the `tr11 nodes` commands share: one look at cluster and ledger, and the health checks."""

from __future__ import annotations

import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Semaphore
from typing import Annotated

import typer
from msgspec.structs import replace

from tr11ops.base.errors import NodeNameError, Refusal, Unobserved, WrongUsage
from tr11ops.base.observed import known
from tr11ops.base.units import duration
from tr11ops.cli.common import not_mounted, plain_text, say, show, table
from tr11ops.cli.progress import node_progress
from tr11ops.cli.runner import RunContext
from tr11ops.cluster.arrays import compress
from tr11ops.cluster.base import Job, Node, Partition, Scheduler
from tr11ops.cluster.pending_reasons import with_room
from tr11ops.health.base import CheckOutcome
from tr11ops.launch.preflight import chosen_partition
from tr11ops.nodes import check as checking
from tr11ops.nodes.check import Answering, NodeCheck, Way
from tr11ops.nodes.health_job import HealthRequest
from tr11ops.nodes.queue_exclusions import (
    QueueChange,
    RunQueue,
    queue_changes,
    resolve,
)
from tr11ops.nodes.view import is_lost, is_shut, support_note
from tr11ops.observe.files import read_submissions
from tr11ops.observe.jobs import own_jobs, why_unmounted
from tr11ops.observe.readers import kind_to_watch, open_scheduler
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.exclusion import (
    Exclusion,
    ExclusionLimit,
    NodeStanding,
    partition_nodes,
    partitions_of,
    what_comes_next,
)
from tr11ops.rundir.exclusions import SharedWord, publish, read_shared, read_version, record_check
from tr11ops.rundir.journal import user_name
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import make_shared, now
from trainer.contract.paths import read_attempt_label
from trainer.contract.record import JsonObject, Record

# ----------------------------------------------------------------------------- cluster and ledger
SCHEMA = 1

ReportOption = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write a note to the site's support about them; - prints it.",
    ),
]


class NodesContext(Record):
    """A run and the cluster it runs on, as they were a moment ago. `partition` is the one that the
    card's jobs use.
    """

    card: RunCard
    directory: RunDirectory
    scheduler: Scheduler
    user: str
    nodes: tuple[Node, ...]
    partition: Partition | None
    jobs: tuple[Job, ...]
    exclusions: tuple[Exclusion, ...]
    suspects: tuple[Exclusion, ...] = ()  # used on, after the others
    # what other runs of the site have on record
    shared: SharedWord = SharedWord()

    @property
    def names(self) -> frozenset[str]:
        """Every name that may be typed: the cluster's nodes, and those on the ledger that left it."""
        return frozenset(
            {node.name for node in self.nodes} | {entry.node for entry in self.exclusions}
        )

    @property
    def partition_nodes(self) -> tuple[Node, ...]:
        """The nodes that count for this run."""
        queued = partitions_of(with_room(self.own_jobs, self.nodes))
        return partition_nodes(self.nodes, queued, *self._other_partitions)

    @property
    def _other_partitions(self) -> tuple[str | None, ...]:
        default = self.partition.name if self.partition else None
        return (self.card.slurm.partition, *(job.partition for job in self.own_jobs), default)

    @property
    def limit(self) -> ExclusionLimit:
        """How many nodes may be excluded as things are now."""
        return ExclusionLimit.of_run(
            self.nodes,
            self.own_jobs,
            partitions=self._other_partitions,
            excluded=self.card.slurm.excluded_nodes,
            allocated=self.card.slurm.least_nodes,
            percent=self.card.resilience.exclusion_cap_percent,
        )

    def forbids(self, names: Sequence[str]) -> bool:
        """Whether `nodes exclude` refuses these without --force: they are too many beside the
        others.
        """
        return self.limit.forbids(names, [entry.node for entry in self.exclusions])

    def exclude_command(self, names: Sequence[str], why: str = "REASON") -> str:
        """The command that excludes these as things are now, with --force where it needs that."""
        command = f"tr11 nodes exclude {compress(names)}"
        if self.forbids(names):
            command += " --force"
        return f"{command} --reason {why}"

    @property
    def own_jobs(self) -> tuple[Job, ...]:
        """Jobs of this run that are not over."""
        submissions, _ = read_submissions(self.directory)
        return own_jobs(self.directory, self.jobs, known(submissions, ()), self.scheduler.name)[0]

    def require_mounted(self) -> None:
        """Raises Refusal where the directory is not the one that the run's jobs were queued from."""
        why = why_unmounted(self.directory, self.jobs, now())
        if why:
            raise not_mounted(self.directory, why)

    @property
    def queue(self) -> RunQueue:
        """The run's jobs, to change which nodes they exclude."""
        known = frozenset(node.name for node in self.nodes)
        return RunQueue(
            self.scheduler,
            lambda: replace(self, jobs=self.scheduler.jobs()).own_jobs,
            lambda: known,
            kept=self.card.slurm.excluded_nodes,
            user=self.user,
        )

    def queue_preview(
        self, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> tuple[QueueChange, ...]:
        """What becomes of queued work when these nodes come onto the ledger, or leave it."""
        listed = ({entry.node for entry in self.exclusions} | set(add)) - set(remove)
        queue = self.queue
        return queue_changes(self.own_jobs, queue.known(), listed, remove, keep=queue.kept)

    def resolve(self, typed: Sequence[str]) -> tuple[str, ...]:
        """The nodes that were typed. Raises Refusal for what cannot be one."""
        try:
            return resolve(typed, self.names)
        except NodeNameError as error:
            raise WrongUsage(f"NODE: {error}") from None

    def find(self, name: str) -> Exclusion | None:
        return next((entry for entry in self.exclusions if entry.node == name), None)


def open_nodes_context(context: RunContext) -> NodesContext:
    """Look once. Raises CardError, Refusal, SchedulerUnreachable, and Refusal when the ledger
    cannot be read.
    """
    (card, directory), kind = context.seen(missing=None), context.scheduler
    scheduler = open_scheduler(kind_to_watch(directory, kind))
    try:
        version = read_version(directory.exclusions)
    except (OSError, ValueError) as error:
        raise Unobserved(f"the list of excluded nodes cannot be read: {error}") from None
    shared = read_shared(card.resilience.shared_exclusions, directory)
    for line in shared.faults:
        say(f"tr11: {line}")
    return NodesContext(
        card=card,
        directory=directory,
        scheduler=scheduler,
        user=user_name(),
        nodes=scheduler.nodes(),
        partition=chosen_partition(card, scheduler.partitions()),
        jobs=scheduler.jobs(),
        exclusions=version.exclusions,
        suspects=version.suspects,
        shared=shared,
    )


def tell_other_runs(nodes_context: NodesContext) -> None:
    """Let the other runs of the site know what this one has on record of nodes."""
    untold = publish(nodes_context.card.resilience.shared_exclusions, nodes_context.directory)
    if untold:
        say(f"tr11: {untold}")


def expiry(entry: Exclusion, now: float) -> str:
    """When an exclusion is due for a check, in words; what is no exclusion has its state before it."""
    if entry.state != NodeStanding.EXCLUDE:
        if entry.until is None:
            return entry.state
        return f"{entry.state}, {duration(max(0.0, entry.until - now))}"
    if entry.until is None:
        return "no expiry"
    if entry.until <= now:
        return f"due for a check since {duration(now - entry.until)}"
    return f"for {duration(entry.until - now)}"


def exclusion_values(entry: Exclusion, now: float) -> JsonObject:
    """One exclusion for --json."""
    return {
        "node": entry.node,
        "why": entry.why,
        "owner": entry.owner,
        "since": entry.since,
        "until": entry.until,
        "is_due": entry.until is not None and entry.until <= now,
        "evidence": list(entry.evidence),
        "job_id": entry.job_id or None,
        "state": entry.state,
        "next": what_comes_next(entry),
    }


def write_note(nodes_context: NodesContext, names: Sequence[str], place: str) -> None:
    """Write the note to the site's support about these nodes to `place`; `-` is the standard
    output.

    They are those that are excluded or that the scheduler does not use; without `names` the
    excluded ones, and those of the run's partition that are lost: what the site has drained it
    knows.
    """
    paths = nodes_context.directory.paths
    entries = [
        replace(entry, job_id=entry.job_id and read_attempt_label(paths, entry.job_id))
        for entry in read_version(nodes_context.directory.exclusions).exclusions
        if not names or entry.node in names
    ]
    listed, own = (
        {entry.node for entry in entries},
        {node.name for node in nodes_context.partition_nodes},
    )
    shut = [
        node
        for node in nodes_context.nodes
        if is_shut(node)
        and (node.name in {*names, *listed} or (not names and node.name in own and is_lost(node)))
    ]
    try:
        text = support_note(
            entries,
            nodes_context.card.run.name,
            nodes_context.user,
            address=nodes_context.card.resilience.support_address,
            shut=shut,
        )
    except ValueError as error:
        raise Refusal(f"--report: {error}") from None
    if place == "-":
        print(text, end="")
    else:
        Path(place).write_text(text, encoding="utf-8")
        print(f"note to the site's support: {place}", file=sys.stderr)


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
        with node_progress("checking nodes", len(names)) as done:

            def advance(entry: NodeCheck) -> None:
                done("" if entry.result == "fine" else f"{entry.node}: {entry.result}")

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


def result_values(entry: NodeCheck) -> JsonObject:
    """One node's result for --json."""
    return {
        "node": entry.node,
        "result": str(entry.result),
        "why": entry.why,
        "checks": [
            {"name": one.name, "result": str(one.result), "why": one.why} for one in entry.checks
        ],
    }


def show_checks(results: Sequence[NodeCheck], lines: Sequence[str] = ()) -> None:
    """Print the results as a table, and the lines below it."""
    made = table("NODE", "RESULT", "WHY")
    for entry in results:
        made.add_row(*map(plain_text, (entry.node, entry.result.upper(), entry.why)))
    if results:
        show(made)
    for line in lines:
        print(line)


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
        slurm=slurm,
        gpus=min([slurm.gpus_per_node, *(each.gpus for each in nodes)]),
        partition=partition,
    )


def _starter(
    nodes_context: NodesContext, folder: Path, on_slurm: bool
) -> Callable[[Way], Answering | NodeCheck]:
    card, nodes = nodes_context.card, {node.name: node for node in nodes_context.nodes}
    ends, slots = checking.EndedJobs(nodes_context.scheduler), Semaphore(checking.PROCESSES_AT_ONCE)

    def start(way: Way) -> Answering | NodeCheck:
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
            return checking.ProcessCheck(way, request, slots)
        settings = job_settings(nodes_context, folder, node)
        return checking.submit_check(
            way, request, settings=settings, scheduler=nodes_context.scheduler, ends=ends
        )

    return start

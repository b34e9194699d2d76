"""`tr11 nodes search`: which of many nodes is bad, by few short jobs on groups of them."""

from __future__ import annotations

import os
import random
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from tr11ops.base.errors import Refusal, SchedulerError
from tr11ops.base.units import counted
from tr11ops.cli import completion
from tr11ops.cli.common import say, timeout_option
from tr11ops.cli.context import JSON, SCHEDULER, RunContext
from tr11ops.cli.nodes_check import free_nodes, job_settings, shared_folder
from tr11ops.cli.nodes_view import SCHEMA, NodesContext, open_nodes_context
from tr11ops.cluster.base import JobState
from tr11ops.cluster.hostlist import compress
from tr11ops.nodes.check import with_code
from tr11ops.nodes.group_job import PROBE, GroupRequest
from tr11ops.nodes.group_runner import LocalGroups, SlurmGroups
from tr11ops.nodes.search import SearchResult, SearchRound, found_bad, plan_round, result_of, search
from tr11ops.nodes.spares import PooledGroups, SpareGroups, spares_of
from tr11ops.nodes.suspects import (
    COMMAND,
    NOTHING,
    FaultModel,
    GroupOutcome,
    GroupTest,
    node_chances,
)

WIDTH = 79
SHOWN = 5


def search_nodes(
    context: Annotated[RunContext, SCHEDULER, JSON],
    nodes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NODE...]",
            help="Names or host lists; default: all free ones.",
            autocompletion=completion.nodes,
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--command",
            metavar="COMMAND",
            help="What each node of a group runs; a status other than 0 is a fault.",
        ),
    ] = None,
    detection: Annotated[
        float,
        typer.Option(
            "--detection",
            metavar="SHARE",
            min=0.05,
            max=0.999,
            help="How often the fault shows: 0.5, every other time.",
        ),
    ] = 0.95,
    least: Annotated[
        int, typer.Option("--group", metavar="NODES", min=1, help="Nodes of the smallest group.")
    ] = 2,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="COUNT", min=1, max=50, help="At most so many.")
    ] = 8,
    seconds: Annotated[float, timeout_option("A job that has not ended by then has failed.")] = 300,
    spares: Annotated[
        bool,
        typer.Option(
            "--spares/--no-spares", help="Also the nodes that a running attempt holds as spares."
        ),
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the first round; run nothing.")
    ] = False,
) -> None:
    """Find the one or two bad nodes among many: jobs on disjoint groups, regrouped by what failed,
    until one is sure.

    Without --command the nodes compute, copy memory and reduce over the group, and every number is
    checked. A fault may come and go (--detection), or show only between two nodes. Spares of the
    run's attempt are searched inside its job, as long as no launch needs them. Nodes that train,
    are busy or down are left out. Nothing is excluded: the command to do so is printed. Exit code
    0: nothing is bad; 1: a node is; 3: it could not be found out.

    Examples:
      tr11 nodes search
      tr11 nodes search jean-zay-iam[01-16] --detection 0.5
      tr11 nodes search --no-spares --dry-run
      tr11 nodes search --command 'python -m trainer.debug.group_probe' --group 4
    """
    nodes_context = open_nodes_context(context)
    free, left_out = free_nodes(nodes_context, nodes or ())
    if spares and _is_slurm(nodes_context):
        holders = spares_of(
            nodes_context.directory.paths, nodes_context.own_jobs, nodes_context.user
        )
    else:
        holders = {}
    holders = {node: holders[node] for node, _ in left_out if node in holders}
    left_out = [(node, why) for node, why in left_out if node not in holders]
    names = [*free, *holders]
    if len(names) < 2:
        raise Refusal(
            f"{counted(len(names), 'node is', 'nodes are')} free to be searched, of 2 at least",
            exit_code=3,
        )
    if least > len(names):
        raise Refusal(
            f"--group {least}: only {counted(len(names), 'node')} can be searched", exit_code=2
        )
    for node, why in left_out:
        say(f"left out: {node}: {why}")
    for job_id in sorted(set(holders.values())):
        held = sorted(node for node, holder in holders.items() if holder == job_id)
        say(f"spares of job {job_id}, searched inside it: {compress(held)}")
    model = FaultModel(detection=detection)
    if dry_run:
        groups = plan_round(names, model.suspicions(names), model, least, random.Random(0))
        for line in [
            f"{counted(len(groups), 'job')} in the first round:",
            *(f"  {compress(group)}" for group in groups),
        ]:
            typer.echo(line)
        return
    folder = shared_folder(nodes_context)
    request = GroupRequest((), command or PROBE, seconds)
    done: list[SearchRound] = []
    try:
        run: Callable[[Sequence[tuple[str, ...]]], Sequence[GroupTest]] = LocalGroups(request)
        if _is_slurm(nodes_context):
            settings = job_settings(nodes_context, folder)
            environment = with_code(dict(os.environ), settings.code_root)
            inside = SpareGroups(
                nodes_context.directory.paths,
                holders,
                request,
                environment,
                lambda job_id: _runs(nodes_context, job_id),
            )
            run = PooledGroups(
                holders, SlurmGroups(nodes_context.scheduler, settings, request), inside
            )
        for one in search(names, run, model, least=least, most_rounds=rounds):
            done.append(one)
            if not context.as_json:
                for line in _round_lines(len(done), one):
                    typer.echo(line)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what a job still writes is left behind
    result = result_of(done)
    context.emit(_document(result, names), _verdict_lines(result))
    raise typer.Exit(_exit_code(result))


def _is_slurm(nodes_context: NodesContext) -> bool:
    return nodes_context.scheduler.name == "slurm"


def _runs(nodes_context: NodesContext, job_id: str) -> bool:
    try:
        job = nodes_context.scheduler.job(job_id)
    except SchedulerError:
        return False
    return job is not None and job.state is JobState.RUNNING


def _exit_code(result: SearchResult) -> int:
    if found_bad(result):
        return 1
    if result.is_sure and result.suspicion.kind == NOTHING:
        return 0
    return 3


# ----------------------------------------------------------------------------- what is shown
def _round_lines(number: int, one: SearchRound) -> Iterator[str]:
    failed = [test for test in one.tests if test.outcome is GroupOutcome.FAILED]
    unknown = [test for test in one.tests if test.outcome is GroupOutcome.UNKNOWN]
    sizes = sorted({len(test.nodes) for test in one.tests})
    if len(sizes) == 1:
        size = str(sizes[0])
    else:
        size = f"{sizes[0]} to {sizes[-1]}"
    not_run = ""
    if unknown:
        not_run = f", {len(unknown)} not run"
    yield f"round {number}: {counted(len(one.tests), 'job')} on groups of {size}: {len(failed)} failed{not_run}"
    for test in (*failed, *unknown):
        line = f"{compress(sorted(test.nodes))}: {test.outcome}: {test.why}"
        yield from textwrap.wrap(
            line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    chances = ", ".join(
        f"{node} {own:.0%}"
        for node, own in list(node_chances(one.weights).items())[:SHOWN]
        if own >= 0.005
    )
    nothing = next(weight for own, weight in one.weights.items() if own.kind == NOTHING)
    yield from textwrap.wrap(
        f"bad with: {chances or '0%'}; none is: {nothing:.0%}",
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
    )


def _verdict_lines(result: SearchResult) -> Iterator[str]:
    bad, spent = (
        found_bad(result),
        f"{counted(len(result.rounds), 'round')}, {counted(result.jobs, 'job')}",
    )
    if not result.is_seen:
        yield f"Nothing is known: no job could be run ({spent})."
    elif not result.is_sure:
        yield f"Not found: the likeliest is {_words(result)} with {result.chance:.0%} ({spent}); --rounds allows more."
    elif result.suspicion.kind == COMMAND:
        yield f"The command fails wherever it runs, with {result.chance:.0%} ({spent}): that accuses no node."
    elif not bad:
        yield f"No node is bad, with {result.chance:.0%} ({spent})."
    else:
        yield f"{_words(result)}, with {result.chance:.0%} ({spent})."
        yield f'  to exclude: tr11 nodes exclude {" ".join(bad)} --reason "nodes search, {result.chance:.0%}"'


def _words(result: SearchResult) -> str:
    names = " and ".join(sorted(result.suspicion.nodes))
    kind = result.suspicion.kind
    if kind in {NOTHING, COMMAND}:
        if kind == NOTHING:
            return "that no node is bad"
        return "that the command fails wherever it runs"
    if kind == "link":
        return f"the link between {names} is bad"
    return f"{names} {'is' if kind == 'node' else 'are'} bad"


def _document(result: SearchResult, names: Sequence[str]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "nodes": list(names),
        "bad": list(found_bad(result)),
        "kind": result.suspicion.kind,
        "chance": result.chance,
        "is_sure": result.is_sure,
        "chances": node_chances(result.rounds[-1].weights),
        "rounds": [
            [
                {"nodes": sorted(test.nodes), "outcome": str(test.outcome), "why": test.why}
                for test in one.tests
            ]
            for one in result.rounds
        ],
    }

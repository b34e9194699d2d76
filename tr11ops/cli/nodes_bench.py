"""`tr11 nodes bench`: which nodes are slower than the others; `search`: which of many is bad."""

from __future__ import annotations

import os
import random
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from tr11ops.base.errors import SchedulerError, Unobserved, WrongUsage
from tr11ops.base.installed import MEASURING_NODES, require
from tr11ops.base.units import counted
from tr11ops.cli import completion
from tr11ops.cli.common import plain_text, say, show, span_option, table, timeout_option
from tr11ops.cli.nodes_check import (
    SCHEMA,
    NodesContext,
    free_nodes,
    job_settings,
    open_nodes_context,
    planned_folder,
    shared_folder,
)
from tr11ops.cli.progress import node_progress
from tr11ops.cli.runner import (
    DRY_RUN,
    JSON,
    SCHEDULER,
    Change,
    Outcome,
    RunContext,
    unasked,
)
from tr11ops.cluster.arrays import compress
from tr11ops.cluster.base import JobState
from tr11ops.nodes.bench_job import BenchRequest, LocalBench, SlurmBench
from tr11ops.nodes.bench_outliers import (
    FINE,
    SLOW,
    UNKNOWN,
    Measurement,
    NodeAnswer,
    NodeSpeed,
    judge_speeds,
)
from tr11ops.nodes.check import job_script, with_code
from tr11ops.nodes.group_job import (
    PROBE,
    GroupRequest,
    GroupRunner,
    SlurmGroups,
    SpareGroups,
    groups_here,
    pooled_groups,
    spares_of,
)
from tr11ops.nodes.search import (
    COMMAND,
    NOTHING,
    FaultModel,
    GroupOutcome,
    SearchResult,
    SearchRound,
    found_bad,
    node_chances,
    plan_round,
    result_of,
    search,
)
from tr11ops.rundir.exclusions import record_check
from trainer.contract.files import make_shared
from trainer.contract.paths import read_attempt_label
from trainer.contract.record import JsonObject

FreeNodes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NODE...]",
        help="Names or host lists; default: all free ones.",
        autocompletion=completion.nodes,
    ),
]

# ----------------------------------------------------------------------------- search
SHOWN = 5


def search_nodes(
    context: Annotated[RunContext, SCHEDULER, JSON, DRY_RUN],
    nodes: FreeNodes = None,
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
) -> Change:
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
    if command is None:
        require(MEASURING_NODES, "tr11 nodes search without --command")
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
        raise Unobserved(
            f"{counted(len(names), 'node is', 'nodes are')} free to be searched, of 2 at least",
        )
    if least > len(names):
        raise WrongUsage(f"--group {least}: only {counted(len(names), 'node')} can be searched")
    for node, why in left_out:
        say(f"left out: {node}: {why}")
    for job_id in sorted(set(holders.values())):
        held = sorted(node for node, holder in holders.items() if holder == job_id)
        label = read_attempt_label(nodes_context.directory.paths, job_id)
        say(f"spares of job {label}, searched inside it: {compress(held)}")
    model = FaultModel(detection=detection)

    def preview() -> Outcome:
        groups = plan_round(
            names, model.suspicions(names), model=model, least=least, chance=random.Random(0)
        )
        lines = (f"  {compress(group)}" for group in groups)
        return Outcome(lines=(f"{counted(len(groups), 'job')} in the first round:", *lines))

    def apply() -> Outcome:
        folder = shared_folder(nodes_context)
        request = GroupRequest((), command or PROBE, seconds)
        done: list[SearchRound] = []
        try:
            run: GroupRunner = partial(groups_here, request=request)
            if _is_slurm(nodes_context):
                settings = job_settings(nodes_context, folder)
                inside = SpareGroups(
                    nodes_context.directory.paths,
                    holders,
                    request=request,
                    environment=with_code(dict(os.environ)),
                    runs=partial(_runs, nodes_context),
                )
                run = partial(
                    pooled_groups,
                    holders=holders,
                    free=SlurmGroups(nodes_context.scheduler, settings, request),
                    spare=inside,
                )
            for one in search(names, run, model, least=least, most_rounds=rounds):
                done.append(one)
                if not context.as_json:
                    for line in _round_lines(len(done), one):
                        typer.echo(line)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # what a job still writes is left behind
        result = result_of(done)
        return Outcome(
            _search_document(result, names),
            _verdict_lines(result, nodes_context),
            exit_code=_exit_code(result),
        )

    return unasked(apply, preview)


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


def _verdict_lines(result: SearchResult, nodes_context: NodesContext) -> Iterator[str]:
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
        why = f'"nodes search, {result.chance:.0%}"'
        yield f"  to exclude: {nodes_context.exclude_command(bad, why)}"


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


def _search_document(result: SearchResult, names: Sequence[str]) -> JsonObject:
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


WIDTH = 79
COLUMNS = {
    "cpu-fp32": "FP32",
    "cpu-bf16": "BF16",
    "cpu-copy": "COPY",
    "gpu-fp32": "G:FP32",
    "gpu-bf16": "G:BF16",
    "gpu-copy": "G:COPY",
    "all-reduce": "TALK",
    "disk-write": "DISK",
}


def bench_nodes(
    context: Annotated[RunContext, SCHEDULER, JSON, DRY_RUN],
    nodes: FreeNodes = None,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            metavar="COUNT",
            min=1,
            max=100,
            help="Samples of each; their median counts.",
        ),
    ] = 5,
    sample: Annotated[
        float,
        typer.Option(
            "--sample",
            parser=span_option,
            metavar="TIME",
            help="How long a sample takes, at least.",
        ),
    ] = 0.5,
    disk: Annotated[
        str,
        typer.Option(
            "--disk",
            metavar="FOLDER",
            help="Also write to this folder of each node, 64 MiB at a time.",
        ),
    ] = "",
    command: Annotated[
        str,
        typer.Option(
            "--command",
            metavar="COMMAND",
            help="Run this instead; it prints lines: NAME VALUE [UNIT].",
        ),
    ] = "",
    timeout: Annotated[
        float, timeout_option("A node that has not ended by then is unknown.")
    ] = 300,
) -> Change:
    """Find nodes that are slower than the others: matrix products, copies, all-reduces in pairs, on
    all nodes at once.

    One job holds the nodes for itself. A node is slow when the median of its samples is an outlier
    below those of the same hardware, or far below all of them. Busy nodes are left out. Nothing is
    excluded: the command is printed. Exit code 0: none is slow; 1: a node is; 3: cannot tell: a
    node gave no answer, had fewer than two others to compare it with, or is far below them by
    samples that scatter too widely.

    Examples:
      tr11 nodes bench
      tr11 nodes bench jean-zay-iam[01-16] --disk /tmp
      tr11 nodes bench --command './my_benchmark.sh' --repeats 3
    """
    if not command:
        require(MEASURING_NODES, "tr11 nodes bench without --command")
    nodes_context = open_nodes_context(context)
    names, left_out = free_nodes(nodes_context, nodes or ())
    for node, why in left_out:
        say(f"left out: {node}: {why}")
    if not names:
        raise Unobserved("no node is free to be measured: `tr11 nodes list` shows who uses them")
    folder = planned_folder(nodes_context)
    request = BenchRequest(
        tuple(names),
        str(folder),
        repeats=repeats,
        sample_seconds=sample,
        seconds=timeout,
        disk=disk,
        command=command,
        on_slurm=nodes_context.scheduler.name == "slurm",
    )
    run: SlurmBench | LocalBench = LocalBench(request)
    if request.on_slurm:
        run = SlurmBench(nodes_context.scheduler, job_settings(nodes_context, folder), request)

    def preview() -> Outcome:
        return Outcome(lines=_plan_lines(run, request))

    def apply() -> Outcome:
        make_shared(folder)
        try:
            with node_progress("measuring nodes", len(names)) as done:

                def advance(answer: NodeAnswer) -> None:
                    done(f"{answer.node}: {answer.why}" if answer.why else "")

                answers = run(advance)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # what a job still writes is left behind
        found = judge_speeds(answers)
        _keep(found, nodes_context, of_speed=not command)
        to_exclude = _exclude_command(found, nodes_context)
        outcomes, code = {entry.outcome for entry in found}, 0
        if SLOW in outcomes:
            code = 1
        elif UNKNOWN in outcomes:
            code = 3
        return Outcome(
            _document(found, left_out, to_exclude),
            exit_code=code,
            screen=partial(_show, found, to_exclude),
        )

    return unasked(apply, preview)


# ----------------------------------------------------------------------------- what is shown
def _plan_lines(run: SlurmBench | LocalBench, request: BenchRequest) -> Iterator[str]:
    count = counted(len(request.nodes), "node")
    if isinstance(run, SlurmBench):
        yield f"one job on {count}: {compress(request.nodes)}"
        yield job_script(run.settings, request.nodes, run.minutes, is_alone=True).rstrip("\n")
    else:
        yield f"no job: {count} of this machine, one after the other: {compress(request.nodes)}"
    yield f"on each node: {' '.join(request.words(0))}"


def _show(found: Sequence[NodeSpeed], to_exclude: str) -> None:
    names = _names(found)
    made = table("NODE", *(COLUMNS.get(name, name.upper()) for name in names), "RESULT")
    for entry in found:
        cells = (_percent(entry.measured.get(name)) for name in names)
        made.add_row(plain_text(entry.node), *cells, _result_word(entry))
    show(made)
    for line in (*_usual_lines(found), *(line for entry in found for line in _node_lines(entry))):
        for part in textwrap.wrap(
            plain_text(line), WIDTH, subsequent_indent="  ", break_on_hyphens=False
        ):
            typer.echo(part)
    if to_exclude:
        typer.echo(f"to exclude: {to_exclude}")


def _names(found: Sequence[NodeSpeed]) -> list[str]:
    """The measurements that any node made, ours in the order of the columns."""
    made = dict.fromkeys(name for entry in found for name in entry.answer.samples)
    return [
        *(name for name in COLUMNS if name in made),
        *(name for name in made if name not in COLUMNS),
    ]


def _percent(own: Measurement | None) -> str:
    if own is None:
        return "-"
    return f"{own.ratio:.0%}" + ("!" if own.is_slow else "")


def _result_word(entry: NodeSpeed) -> str:
    if entry.outcome != UNKNOWN:
        return {FINE: "fine", SLOW: "SLOW"}[entry.outcome]
    if not entry.answer.samples:
        return "no answer"
    if entry.answer.why:
        return "part of it"
    if entry.far_below:
        return "unsure"
    return "alone"


def _usual_lines(found: Sequence[NodeSpeed]) -> Iterator[str]:
    """What 100 % is, for each hardware."""
    kinds: dict[str, dict[str, str]] = {}
    for entry in found:
        for name, own in entry.measured.items():
            kinds.setdefault(entry.answer.hardware, {})[name] = _speed(
                own.usual, entry.answer.units.get(name, "")
            )
    for hardware, usual in kinds.items():
        values = ", ".join(f"{name} {value}" for name, value in usual.items())
        yield f"100% is{f' with {hardware}' if hardware else ''}: {values}"


def _node_lines(entry: NodeSpeed) -> Iterator[str]:
    units = entry.answer.units
    for name in entry.slow:
        own, unit = entry.measured[name], units.get(name, "")
        yield (
            f"{entry.node}: {name} at {own.ratio:.0%} of what is usual among {counted(own.peers, 'node')}: "
            f"{_speed(own.value, unit)}, below {_speed(own.bound, unit)} is slow"
        )
    if entry.outcome == UNKNOWN and entry.far_below:
        name = entry.far_below[0]
        yield (
            f"{entry.node}: cannot tell: {name} at {entry.measured[name].ratio:.0%} of what is usual, but the samples "
            "scatter too widely, or are too few, to call it slow: measure again with more `--repeats`"
        )
    if entry.answer.why:
        yield f"{entry.node}: {entry.answer.why}"
    elif entry.answer.samples and not entry.measured:
        values = ", ".join(
            f"{name} {_speed(entry.answer.value(name) or 0.0, units[name])}" for name in units
        )
        yield f"{entry.node}: {values}; to compare, three nodes of the same hardware are needed"


def _speed(value: float, unit: str) -> str:
    """A speed with three digits: `45.2 GFLOP/s`."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000 or prefix == "T":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}".rstrip()


def _keep(found: Sequence[NodeSpeed], nodes_context: NodesContext, of_speed: bool) -> None:
    """Keep in the journal what was found. What a command of one's own measures tells nothing of how
    quickly a node computes.
    """
    if not nodes_context.directory.exists:
        return
    for entry in found:
        why = next(_node_lines(entry), "").removeprefix(f"{entry.node}: ")
        record_check(
            nodes_context.directory,
            entry.node,
            result=entry.outcome,
            why=why or "nodes bench: as quick as the others",
            owner=nodes_context.user,
            of_speed=of_speed,
        )


def _exclude_command(found: Sequence[NodeSpeed], nodes_context: NodesContext) -> str:
    """The command that excludes the slow nodes; "" where none is."""
    slow = [entry for entry in found if entry.outcome == SLOW]
    if not slow:
        return ""
    worst = slow[0].slow[0]
    why = f'"nodes bench, {worst} {slow[0].measured[worst].ratio:.0%}"'
    return nodes_context.exclude_command([entry.node for entry in slow], why)


def _document(
    found: Sequence[NodeSpeed], left_out: Sequence[tuple[str, str]], to_exclude: str
) -> JsonObject:
    slow = [entry for entry in found if entry.outcome == SLOW]
    return {
        "schema": SCHEMA,
        "nodes": [
            {
                "node": entry.node,
                "result": entry.outcome,
                "why": entry.answer.why,
                "hardware": entry.answer.hardware,
                "slow": list(entry.slow),
                "measurements": {
                    name: _measured_values(entry, name) for name in entry.answer.samples
                },
            }
            for entry in found
        ],
        "slow": [entry.node for entry in slow],
        "left_out": [{"node": node, "why": why} for node, why in left_out],
        "exclude_command": to_exclude or None,
    }


def _measured_values(entry: NodeSpeed, name: str) -> Mapping[str, Any]:
    own = entry.measured.get(name)
    return {
        "value": entry.answer.value(name),
        "unit": entry.answer.units.get(name, ""),
        "usual": own.usual if own else None,
        "bound": own.bound if own else None,
        "is_slow": own.is_slow if own else None,
        "samples": {part: list(values) for part, values in entry.answer.samples[name].items()},
    }

"""`tr11 nodes bench`: which nodes are slower than the others, by short measurements on all of them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.base.errors import Refusal
from tr11ops.base.units import counted
from tr11ops.cli import completion
from tr11ops.cli.common import is_terminal, say, span_option, timeout_option
from tr11ops.cli.context import JSON, SCHEDULER, RunContext
from tr11ops.cli.nodes_check import free_nodes, job_settings, planned_folder, shared_folder
from tr11ops.cli.nodes_view import SCHEMA, open_nodes_context
from tr11ops.cli.terminal import plain_text, show, table
from tr11ops.cluster.hostlist import compress
from tr11ops.nodes.bench_answer import NodeAnswer
from tr11ops.nodes.bench_job import BenchRequest
from tr11ops.nodes.bench_outliers import FINE, SLOW, UNKNOWN, Measurement, NodeSpeed, judge_speeds
from tr11ops.nodes.bench_runner import LocalBench, SlurmBench
from tr11ops.nodes.check import job_script

if TYPE_CHECKING:
    from collections.abc import Callable

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
    context: Annotated[RunContext, SCHEDULER, JSON],
    nodes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NODE...]",
            help="Names or host lists; default: all free ones.",
            autocompletion=completion.nodes,
        ),
    ] = None,
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the batch script; run nothing.")
    ] = False,
) -> None:
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
    nodes_context = open_nodes_context(context)
    names, left_out = free_nodes(nodes_context, nodes or ())
    for node, why in left_out:
        say(f"left out: {node}: {why}")
    if not names:
        raise Refusal(
            "no node is free to be measured: `tr11 nodes list` shows who uses them", exit_code=3
        )
    if dry_run:
        folder = planned_folder(nodes_context)
    else:
        folder = shared_folder(nodes_context)
    request = BenchRequest(
        tuple(names),
        str(folder),
        repeats,
        sample,
        timeout,
        disk,
        command,
        on_slurm=nodes_context.scheduler.name == "slurm",
    )
    try:
        run = (
            SlurmBench(nodes_context.scheduler, job_settings(nodes_context, folder), request)
            if request.on_slurm
            else LocalBench(request)
        )
        if dry_run:
            for line in _plan_lines(run, request):
                typer.echo(line)
            return
        with _progress(len(names)) as advance:
            answers = run(advance)
    finally:
        if not dry_run:
            shutil.rmtree(folder, ignore_errors=True)  # what a job still writes is left behind
    found = judge_speeds(answers)
    if context.as_json:
        context.emit(_document(found, left_out))
    else:
        _show(found)
    outcomes = {entry.outcome for entry in found}
    if SLOW in outcomes:
        raise typer.Exit(1)
    raise typer.Exit(3 if UNKNOWN in outcomes else 0)


# ----------------------------------------------------------------------------- what is shown
def _plan_lines(run: SlurmBench | LocalBench, request: BenchRequest) -> Iterator[str]:
    count = counted(len(request.nodes), "node")
    if isinstance(run, SlurmBench):
        yield f"one job on {count}: {compress(request.nodes)}"
        yield job_script(run.settings, request.nodes, run.minutes, is_alone=True).rstrip("\n")
    else:
        yield f"no job: {count} of this machine, one after the other: {compress(request.nodes)}"
    yield f"on each node: {' '.join(request.words(0))}"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[NodeAnswer], None]]:
    """A bar on a terminal; elsewhere a line for each node that could not be measured."""
    if not is_terminal():
        yield lambda answer: say(f"{answer.node}: {answer.why}") if answer.why else None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("measuring nodes"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda answer: bar.update(task, advance=1)


def _show(found: Sequence[NodeSpeed]) -> None:
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
    if slow := [entry for entry in found if entry.outcome == SLOW]:
        typer.echo(f"to exclude: {_exclude_command(slow)}")


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


def _exclude_command(slow: Sequence[NodeSpeed]) -> str:
    worst = slow[0].slow[0]
    ratio = f"{slow[0].measured[worst].ratio:.0%}"
    return f'tr11 nodes exclude {" ".join(entry.node for entry in slow)} --reason "nodes bench, {worst} {ratio}"'


def _document(found: Sequence[NodeSpeed], left_out: Sequence[tuple[str, str]]) -> dict[str, Any]:
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
        "exclude_command": _exclude_command(slow) if slow else None,
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

"""`tr11 twin`: a real Slurm of many nodes on this machine, to try everything on."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.base.errors import Refusal, TwinError
from tr11ops.base.units import counted
from tr11ops.cli.common import JsonOption, say
from tr11ops.cli.context import emit
from tr11ops.cli.terminal import drawing_console
from tr11ops.cli.twin_faults import DirectoryOption, NameOption, fault, fault_line, fault_object, heal
from tr11ops.cluster.hostlist import compress
from tr11ops.twin.faults import active
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.services import advice
from tr11ops.twin.twin import Twin

if TYPE_CHECKING:
    from tr11ops.twin.fault_store import InjectedFault
    from tr11ops.twin.twin import TwinStatus

TWIN_SCHEMA = 1

app = typer.Typer(
    name="twin",
    help="""A real Slurm of many nodes on this machine: slurmctld, one slurmd a node, private ports and folders.

    Examples:
      tr11 twin up --nodes 6
      eval "$(tr11 twin env)"; sinfo
      tr11 twin down
    """,
    no_args_is_help=True,
)

app.command()(fault)
app.command()(heal)


@contextlib.contextmanager
def _refusals(exit_code: int = 1) -> Iterator[None]:
    try:
        yield
    except TwinError as error:
        raise Refusal(str(error), exit_code) from error


def _find(name: str, directory: Path | None) -> Twin:
    with _refusals():
        return Twin.find(name, directory)


@app.command()
def up(
    *,
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes with GPUs.")] = 52,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs on each of them; stand-ins, no memory is used.")] = 8,
    cpu_nodes: Annotated[int, typer.Option("--cpu-nodes", help="Nodes without GPUs, in their own partition.")] = 1,
    accounting: Annotated[bool, typer.Option("--accounting", help="With slurmdbd and a private MariaDB.")] = False,
    hub: Annotated[bool, typer.Option("--hub", help="With a hub for logs and models.")] = False,
    store: Annotated[bool, typer.Option("--store", help="With an object store for copies.")] = False,
    name: NameOption = "default",
    directory: DirectoryOption = None,
    node_prefix: Annotated[str, typer.Option("--node-prefix", help="Names of the GPU nodes.")] = "jean-zay-iam",
    partition: Annotated[str, typer.Option("--partition", help="Partition of the GPU nodes.")] = "gpu_p5",
    cpu_partition: Annotated[str, typer.Option("--cpu-partition", help="Partition of the others.")] = "compil",
    cpus: Annotated[int, typer.Option("--cpus", help="CPUs that each node announces.")] = 64,
    slurmd_timeout: Annotated[
        int, typer.Option("--slurmd-timeout", metavar="SECONDS", help="Silence after which a node is down.")
    ] = 60,
    job_age: Annotated[
        int, typer.Option("--min-job-age", metavar="SECONDS", help="How long ended jobs stay known.")
    ] = 300,
    kill_wait: Annotated[
        int, typer.Option("--kill-wait", metavar="SECONDS", help="From SIGTERM to SIGKILL at a time limit.")
    ] = 5,
    unkillable: Annotated[
        int,
        typer.Option("--unkillable-step-timeout", metavar="SECONDS", help="Until a node with a stuck step is drained."),
    ] = 60,
) -> None:
    """Start a twin and wait until every node is idle. A running twin of the same shape is taken as it is.

    Examples:
      tr11 twin up --nodes 6
      tr11 twin up --nodes 6 --hub --store
      eval "$(tr11 twin env)"; sinfo
      tr11 twin down
    """
    with _refusals(exit_code=2):
        plan = TwinPlan(
            name=name,
            nodes=nodes,
            gpus=gpus,
            cpu_nodes=cpu_nodes,
            cpus=cpus,
            node_prefix=node_prefix,
            partition=partition,
            cpu_partition=cpu_partition,
            accounting=accounting,
            hub=hub,
            store=store,
            slurmd_timeout_seconds=slurmd_timeout,
            minimum_job_age_seconds=job_age,
            kill_wait_seconds=kill_wait,
            unkillable_step_timeout_seconds=unkillable,
        )
    began = time.monotonic()
    with _refusals():
        twin = Twin.up(plan, directory, lambda text: say(f"{time.monotonic() - began:5.1f} s  {text}"))
    say(f"twin {name} is up after {time.monotonic() - began:.1f} s: {counted(len(plan.node_names), 'node')} idle")
    use = twin.command("env")
    say(f'use it: eval "$({use})"')
    for line in advice(plan, twin.ports):
        say(line)
    typer.echo(twin.folders.root)


@app.command()
def down(
    *,
    name: NameOption = "default",
    directory: DirectoryOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the logs, beside the twin's folder.")] = False,
) -> None:
    """End a twin: its daemons, its jobs, its folder. No other Slurm on this machine is touched.

    Examples:
      tr11 twin down
      tr11 twin down --name rehearsal --keep
    """
    twin = _find(name, directory)
    began = time.monotonic()
    pointing = [key for key, value in twin.environment.items() if os.environ.get(key) == value]
    with _refusals():
        kept = twin.down(keep_logs=keep)
    say(f"twin {name} is down after {time.monotonic() - began:.1f} s: nothing of it runs, its folder is removed")
    if pointing:
        say(f"this shell still speaks to it: unset {' '.join(pointing)}")
    if kept is not None:
        say("its logs:")
        typer.echo(kept)


@app.command()
def status(*, name: NameOption = "default", directory: DirectoryOption = None, as_json: JsonOption = False) -> None:
    """What runs, what the twin's controller says of its nodes, and which faults were given to it.

    Exit code 0: healthy; 1: a daemon has ended or a node is down; 3: the controller does not answer.

    Examples:
      tr11 twin status --json
    """
    twin = _find(name, directory)
    seen = twin.status()
    with _refusals():
        faults = active(twin)
    if as_json:
        emit(_as_object(twin, seen, faults), indent=2)
    else:
        _show(seen, faults)
    raise typer.Exit(0 if seen.is_healthy else 1 if seen.answers or seen.dead else 3)


@app.command()
def env(*, name: NameOption = "default", directory: DirectoryOption = None) -> None:
    """Print the lines which make Slurm's commands of this shell speak to the twin, and `tr11 twin` mean it.

    Examples:
      eval "$(tr11 twin env)"
    """
    for key, value in _find(name, directory).environment.items():
        typer.echo(f"export {key}={shlex.quote(value)}")


@app.command(context_settings={"ignore_unknown_options": True})
def shell(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="Run this instead of a shell.")
    ] = None,
    *,
    name: NameOption = "default",
    directory: DirectoryOption = None,
) -> None:
    """Open a shell, or run one command, whose Slurm is the twin.

    Examples:
      tr11 twin shell
      tr11 twin shell -- srun -N 4 hostname
    """
    twin = _find(name, directory)
    arguments = command or [os.environ.get("SHELL") or "/bin/sh"]
    if not command:
        say(f"Slurm's commands speak to twin {name} now; leave with exit")
    sys.stdout.flush()
    try:
        os.execvpe(arguments[0], arguments, {**os.environ, **twin.environment})
    except OSError as error:
        raise Refusal(f"{arguments[0]} cannot be run: {error.strerror}", exit_code=2) from error


def _as_object(twin: Twin, seen: TwinStatus, faults: tuple[InjectedFault, ...]) -> dict[str, Any]:
    return {
        "schema": TWIN_SCHEMA,
        "name": seen.name,
        "directory": str(seen.directory),
        "healthy": seen.is_healthy,
        "answers": seen.answers,
        "controller_port": seen.controller_port,
        "memory_megabytes": seen.memory_megabytes,
        "environment": twin.environment,
        "plan": seen.plan.to_json(),
        "faults": [fault_object(each) for each in faults],
        "nodes": [{"name": node.name, "state": node.state, "daemon_alive": node.daemon_alive} for node in seen.nodes],
        "daemons": [
            {"role": record.role, "name": record.name, "pid": record.pid, "alive": record in seen.daemons}
            for record in (*seen.daemons, *seen.dead)
        ],
    }


def _show(seen: TwinStatus, faults: tuple[InjectedFault, ...]) -> None:
    """Nodes of one state in one row, so that a twin of 52 nodes fits a screen."""
    from rich.markup import escape
    from rich.table import Table

    console = drawing_console(markup=True)
    state = "[green]healthy[/]" if seen.is_healthy else "[red]not healthy[/]" if seen.answers else "[yellow]silent[/]"
    console.print(
        f"twin [bold]{escape(seen.name)}[/]: {state}, port {seen.controller_port}, "
        f"{len(seen.daemons)} daemons, {seen.memory_megabytes} MB"
    )
    console.print(escape(str(seen.directory)), style="dim", soft_wrap=True)
    table = Table("state", "nodes", "names", box=None, header_style="bold", pad_edge=False)
    groups: dict[str, list[str]] = {}
    for node in seen.nodes:
        groups.setdefault(node.state if node.daemon_alive else f"{node.state}, slurmd ended", []).append(node.name)
    for group, names in sorted(groups.items()):
        table.add_row(group, str(len(names)), escape(compress(names)))
    console.print(table)
    if seen.dead:
        console.print(f"[red]ended:[/] {escape(', '.join(record.name for record in seen.dead))}")
    for each in faults:
        console.print(f"[yellow]fault:[/] {escape(fault_line(each, time.time()))}", soft_wrap=True)
    if not seen.answers:
        console.print("the controller does not answer: states are unknown")

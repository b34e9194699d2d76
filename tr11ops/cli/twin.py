"""`tr11 twin`: a real Slurm of many nodes on this machine, to try everything on, and to break on
purpose.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tr11ops.base.errors import Refusal, TwinError, WrongUsage
from tr11ops.base.units import counted, duration
from tr11ops.cli import completion
from tr11ops.cli.common import drawing_console, say, span_option
from tr11ops.cli.runner import JSON, NO_RUN, Outcome, RunContext
from tr11ops.cluster.arrays import compress, expand
from tr11ops.twin.fault_kinds import KINDS, find_kind
from tr11ops.twin.fault_store import InjectedFault
from tr11ops.twin.faults import active, heal as heal_twin, inject
from tr11ops.twin.machine import advice
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import HOME_VARIABLE, NAME_VARIABLE, Twin, TwinStatus
from trainer.contract.record import JsonObject

FAULT_SCHEMA = 1
TWIN_SCHEMA = 1


# ----------------------------------------------------------------------------- fault
NameOption = Annotated[
    str,
    typer.Option(
        "--name",
        metavar="NAME",
        envvar=NAME_VARIABLE,
        show_envvar=False,
        help="Which twin; several may run side by side. Else the one that `tr11 twin env` named in this shell.",
    ),
]
DirectoryOption = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="DIR",
        envvar=HOME_VARIABLE,
        show_envvar=False,
        help="Folder of the twins. Else tr11/twin in $XDG_STATE_HOME or ~/.local/state; root: /var/lib/tr11/twin.",
    ),
]


def fault(
    context: Annotated[RunContext, NO_RUN, JSON],
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]",
            help="Left out: list the kinds.",
            autocompletion=completion.fault_kinds,
        ),
    ] = None,
    *,
    node: Annotated[
        str | None,
        typer.Option(
            "--node", metavar="NODES", help="node3, or node[3-4]. Else the last node with a job."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--for",
            parser=span_option,
            metavar="TIME",
            help="Heal by itself after this long: 60s, 5m, 1h.",
        ),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(
            "--path", metavar="PATH", help="The directory or script, of kinds that are of one."
        ),
    ] = None,
    reason: Annotated[
        str | None, typer.Option("--reason", metavar="TEXT", help="Of drain and node-failing.")
    ] = None,
    name: NameOption = "default",
    directory: DirectoryOption = None,
) -> Outcome:
    """Break a twin on purpose: a node, a worker, the controller, a directory. Nothing but the twin
    is touched.

    A fault stays until `tr11 twin heal`, or as long as --for says. `tr11 twin status` shows what is
    broken.

    Exit code 0: broken, or it was already; 1: it could not be done; 2: no such kind, node or
    directory.

    Examples:
      tr11 twin fault
      tr11 twin fault node-dead --node jean-zay-iam03 --for 60s
      tr11 twin fault disk-full --path $PWD/run
    """
    if kind is None:
        return _kinds()
    try:
        find_kind(kind)
        nodes = _expand(node)
    except TwinError as error:
        raise WrongUsage(str(error)) from error
    done, said = [], []
    try:
        twin = Twin.find(name, directory)
        for each in nodes:
            injection = inject(twin, kind, node=each, path=path, seconds=seconds, reason=reason)
            done.append(fault_object(injection.fault))
            said.append(_sentence(twin, injection.fault, injection.was_there))
    except TwinError as error:
        raise Refusal(str(error), exit_code=2 if str(error).startswith("--") else 1) from error
    return Outcome({"schema": FAULT_SCHEMA, "faults": done}, remarks=said, indent=2)


def heal(
    context: Annotated[RunContext, NO_RUN, JSON],
    *,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="Only faults of this kind.")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", metavar="NODE", help="Only this node's.")
    ] = None,
    name: NameOption = "default",
    directory: DirectoryOption = None,
) -> Outcome:
    """Undo every fault of a twin, no matter who made it; also one whose maker has crashed.

    Exit code 0: nothing is broken any more; 1: something could not be repaired, and may be tried
    again.

    Examples:
      tr11 twin heal
    """
    try:
        healed = heal_twin(Twin.find(name, directory), kind=kind, target=node)
    except TwinError as error:
        raise Refusal(str(error)) from error
    rows = [
        {**fault_object(healing.fault), "text": healing.text, "error": healing.error}
        for healing in healed
    ]
    said = [f"{one.fault}: {one.text or 'NOT healed: ' + one.error}" for one in healed]
    return Outcome(
        {"schema": FAULT_SCHEMA, "healed": rows},
        remarks=said or ["nothing was broken"],
        exit_code=1 if any(healing.error for healing in healed) else 0,
        indent=2,
    )


def fault_object(fault: InjectedFault) -> JsonObject:
    """A fault as an object of `--json`."""
    return {
        "kind": fault.kind,
        "target": fault.target,
        "started": fault.started,
        "until": fault.until,
        "complete": fault.is_complete,
        "agent_ended": fault.is_lost,
        "pids": [record.pid for record in fault.processes],
    }


def fault_line(fault: InjectedFault, now: float) -> str:
    """A fault in one line: what, where, since when, until when."""
    words = f"{fault} since {duration(now - fault.started)}"
    if fault.until is not None:
        words += f", heals in {duration(fault.until - now)}"
    if not fault.is_complete:
        return f"{words}, half done: its command has ended; heal it"
    if fault.is_lost:
        return f"{words}, but what kept it up has ended; heal it"
    return words


def _sentence(twin: Twin, fault: InjectedFault, was_there: bool) -> str:
    kind = KINDS[fault.kind]
    if was_there:
        return f"already broken: {fault_line(fault, time.time())}"
    if kind.is_instant:
        return f"done: {fault}"
    if fault.until:
        end = f"heals by itself in {fault.until - fault.started:g} s"
    else:
        end = f"undo it: {twin.command('heal')}"
    return f"broken: {fault}; {end}"


def _expand(nodes: str | None) -> list[str | None]:
    if nodes is None:
        return [None]
    try:
        return list(expand(nodes))
    except ValueError as error:
        raise TwinError(f"--node {nodes!r} is not a list of nodes ({error})") from None


def _kinds() -> Outcome:
    rows = [
        {"name": kind.name, "target": kind.target, "does": kind.does, "heals": kind.heals}
        for kind in KINDS.values()
    ]
    return Outcome({"schema": FAULT_SCHEMA, "kinds": rows}, indent=2, screen=_show_kinds)


def _show_kinds() -> None:
    table = Table(
        "kind", "of a", "what it does", "heal", box=None, header_style="bold", pad_edge=False
    )
    for kind in KINDS.values():
        table.add_row(kind.name, kind.target, kind.does, kind.heals)
    drawing_console(markup=True).print(table)


# ----------------------------------------------------------------------------- the commands
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
    gpus: Annotated[
        int, typer.Option("--gpus", help="GPUs on each of them; stand-ins, no memory is used.")
    ] = 8,
    cpu_nodes: Annotated[
        int, typer.Option("--cpu-nodes", help="Nodes without GPUs, in their own partition.")
    ] = 1,
    accounting: Annotated[
        bool, typer.Option("--accounting", help="With slurmdbd and a private MariaDB.")
    ] = False,
    hub: Annotated[bool, typer.Option("--hub", help="With a hub for logs and models.")] = False,
    store: Annotated[
        bool, typer.Option("--store", help="With an object store for copies.")
    ] = False,
    name: NameOption = "default",
    directory: DirectoryOption = None,
    node_prefix: Annotated[
        str, typer.Option("--node-prefix", help="Names of the GPU nodes.")
    ] = "jean-zay-iam",
    partition: Annotated[
        str, typer.Option("--partition", help="Partition of the GPU nodes.")
    ] = "gpu_p5",
    cpu_partition: Annotated[
        str, typer.Option("--cpu-partition", help="Partition of the others.")
    ] = "compil",
    cpus: Annotated[int, typer.Option("--cpus", help="CPUs that each node announces.")] = 64,
    slurmd_timeout: Annotated[
        int,
        typer.Option(
            "--slurmd-timeout", metavar="SECONDS", help="Silence after which a node is down."
        ),
    ] = 60,
    job_age: Annotated[
        int,
        typer.Option("--min-job-age", metavar="SECONDS", help="How long ended jobs stay known."),
    ] = 300,
    kill_wait: Annotated[
        int,
        typer.Option(
            "--kill-wait", metavar="SECONDS", help="From SIGTERM to SIGKILL at a time limit."
        ),
    ] = 5,
    unkillable: Annotated[
        int,
        typer.Option(
            "--unkillable-step-timeout",
            metavar="SECONDS",
            help="Until a node with a stuck step is drained.",
        ),
    ] = 60,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A line of slurm.conf, such as PrivateData=jobs; may be given again.",
        ),
    ] = None,
) -> None:
    """Start a twin and wait until every node is idle. A running twin of the same shape is taken as
    it is.

    Examples:
      tr11 twin up --nodes 6
      tr11 twin up --nodes 6 --hub --store
      tr11 twin up --nodes 6 --set MaxArraySize=1 --set PrivateData=jobs,nodes
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
            slurm_settings=tuple(settings or ()),
        )
    began = time.monotonic()
    with _refusals():
        twin = Twin.up(
            plan, directory, lambda text: say(f"{time.monotonic() - began:5.1f} s  {text}")
        )
    say(
        f"twin {name} is up after {time.monotonic() - began:.1f} s: {counted(len(plan.node_names), 'node')} idle"
    )
    use = twin.command("env")
    say(f'use it: eval "$({use})"')
    for line in advice(twin):
        say(line)
    typer.echo(twin.folders.root)


@app.command()
def down(
    *,
    name: NameOption = "default",
    directory: DirectoryOption = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the logs, beside the twin's folder.")
    ] = False,
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
    say(
        f"twin {name} is down after {time.monotonic() - began:.1f} s: nothing of it runs, its folder is removed"
    )
    if pointing:
        say(f"this shell still speaks to it: unset {' '.join(pointing)}")
    if kept is not None:
        say("its logs:")
        typer.echo(kept)


@app.command()
def status(
    context: Annotated[RunContext, NO_RUN, JSON],
    *,
    name: NameOption = "default",
    directory: DirectoryOption = None,
) -> Outcome:
    """What runs, what the twin's controller says of its nodes, and which faults were given to it.

    Exit code 0: healthy; 1: a daemon has ended or a node is down; 3: the controller does not
    answer.

    Examples:
      tr11 twin status --json
    """
    twin = _find(name, directory)
    seen = twin.status()
    with _refusals():
        faults = active(twin)
    code = 0
    if not seen.is_healthy:
        code = 1 if seen.answers or seen.dead else 3
    document, shown = _as_object(twin, seen, faults), partial(_show, seen, faults)
    return Outcome(document, exit_code=code, indent=2, screen=shown)


@app.command()
def env(*, name: NameOption = "default", directory: DirectoryOption = None) -> None:
    """Print the lines which make Slurm's commands of this shell speak to the twin, and `tr11 twin`
    mean it.

    Examples:
      eval "$(tr11 twin env)"
    """
    for key, value in _find(name, directory).environment.items():
        typer.echo(f"export {key}={shlex.quote(value)}")


@app.command(context_settings={"ignore_unknown_options": True})
def shell(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]...", help="Run this instead of a shell."),
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
        raise WrongUsage(f"{arguments[0]} cannot be run: {error.strerror}") from error


def _as_object(twin: Twin, seen: TwinStatus, faults: tuple[InjectedFault, ...]) -> JsonObject:
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
        "nodes": [
            {"name": node.name, "state": node.state, "daemon_alive": node.daemon_alive}
            for node in seen.nodes
        ],
        "daemons": [
            {
                "role": record.role,
                "name": record.name,
                "pid": record.pid,
                "alive": record in seen.daemons,
            }
            for record in (*seen.daemons, *seen.dead)
        ],
    }


def _show(seen: TwinStatus, faults: tuple[InjectedFault, ...]) -> None:
    """Nodes of one state in one row, so that a twin of 52 nodes fits a screen."""
    console = drawing_console(markup=True)
    if seen.is_healthy:
        state = "[green]healthy[/]"
    elif seen.answers:
        state = "[red]not healthy[/]"
    else:
        state = "[yellow]silent[/]"
    console.print(
        f"twin [bold]{escape(seen.name)}[/]: {state}, port {seen.controller_port}, "
        f"{len(seen.daemons)} daemons, {seen.memory_megabytes} MB"
    )
    console.print(escape(str(seen.directory)), style="dim", soft_wrap=True)
    table = Table("state", "nodes", "names", box=None, header_style="bold", pad_edge=False)
    groups: dict[str, list[str]] = {}
    for node in seen.nodes:
        groups.setdefault(
            node.state if node.daemon_alive else f"{node.state}, slurmd ended", []
        ).append(node.name)
    for group, names in sorted(groups.items()):
        table.add_row(group, str(len(names)), escape(compress(names)))
    console.print(table)
    if seen.dead:
        console.print(f"[red]ended:[/] {escape(', '.join(record.name for record in seen.dead))}")
    for each in faults:
        console.print(f"[yellow]fault:[/] {escape(fault_line(each, time.time()))}", soft_wrap=True)
    if not seen.answers:
        console.print("the controller does not answer: states are unknown")

"""`tr11 twin fault` and `tr11 twin heal`: break a twin on purpose, and repair it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.base.errors import Refusal, TwinError
from tr11ops.base.units import duration
from tr11ops.cli import completion
from tr11ops.cli.common import JsonOption, say, span_option
from tr11ops.cli.context import emit
from tr11ops.cli.terminal import drawing_console
from tr11ops.cluster.hostlist import expand
from tr11ops.twin.fault_kinds import KINDS, find_kind
from tr11ops.twin.faults import heal as heal_twin
from tr11ops.twin.faults import inject
from tr11ops.twin.twin import HOME_VARIABLE, NAME_VARIABLE, Twin

if TYPE_CHECKING:
    from tr11ops.twin.fault_store import InjectedFault

FAULT_SCHEMA = 1

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
    kind: Annotated[
        str | None,
        typer.Argument(metavar="[KIND]", help="Left out: list the kinds.", autocompletion=completion.fault_kinds),
    ] = None,
    *,
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="NODES", help="node3, or node[3-4]. Else the last node with a job."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--for", parser=span_option, metavar="TIME", help="Heal by itself after this long: 60s, 5m, 1h."),
    ] = None,
    path: Annotated[
        str | None, typer.Option("--path", metavar="PATH", help="The directory or script, of kinds that are of one.")
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Of drain and node-failing.")] = None,
    name: NameOption = "default",
    directory: DirectoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Break a twin on purpose: a node, a worker, the controller, a directory. Nothing but the twin is touched.

    A fault stays until `tr11 twin heal`, or as long as --for says. `tr11 twin status` shows what is broken.

    Exit code 0: broken, or it was already; 1: it could not be done; 2: no such kind, node or directory.

    Examples:
      tr11 twin fault
      tr11 twin fault node-dead --node jean-zay-iam03 --for 60s
      tr11 twin fault disk-full --path $PWD/run
    """
    if kind is None:
        _show_kinds(as_json)
        return
    try:
        find_kind(kind)
        nodes = _expand(node)
    except TwinError as error:
        raise Refusal(str(error), exit_code=2) from error
    done = []
    try:
        twin = Twin.find(name, directory)
        for each in nodes:
            injection = inject(twin, kind, node=each, path=path, seconds=seconds, reason=reason)
            done.append(fault_object(injection.fault))
            if not as_json:
                say(_sentence(twin, injection.fault, injection.was_there))
    except TwinError as error:
        raise Refusal(str(error), exit_code=2 if str(error).startswith("--") else 1) from error
    if as_json:
        emit({"schema": FAULT_SCHEMA, "faults": done}, indent=2)


def heal(
    *,
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="Only faults of this kind.")] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="NODE", help="Only this node's.")] = None,
    name: NameOption = "default",
    directory: DirectoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Undo every fault of a twin, no matter who made it; also one whose maker has crashed.

    Exit code 0: nothing is broken any more; 1: something could not be repaired, and may be tried again.

    Examples:
      tr11 twin heal
    """
    try:
        healed = heal_twin(Twin.find(name, directory), kind=kind, target=node)
    except TwinError as error:
        raise Refusal(str(error)) from error
    errors = [healing for healing in healed if healing.error]
    if as_json:
        rows = [{**fault_object(healing.fault), "text": healing.text, "error": healing.error} for healing in healed]
        emit({"schema": FAULT_SCHEMA, "healed": rows}, indent=2)
    else:
        for healing in healed:
            say(f"{healing.fault}: {healing.text or 'NOT healed: ' + healing.error}")
        if not healed:
            say("nothing was broken")
    raise typer.Exit(1 if errors else 0)


def fault_object(fault: InjectedFault) -> dict[str, Any]:
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
    return f"{words}, but what kept it up has ended; heal it" if fault.is_lost else words


def _sentence(twin: Twin, fault: InjectedFault, was_there: bool) -> str:
    kind = KINDS[fault.kind]
    if was_there:
        return f"already broken: {fault_line(fault, time.time())}"
    if kind.is_instant:
        return f"done: {fault}"
    end = f"heals by itself in {fault.until - fault.started:g} s" if fault.until else f"undo it: {twin.command('heal')}"
    return f"broken: {fault}; {end}"


def _expand(nodes: str | None) -> list[str | None]:
    if nodes is None:
        return [None]
    try:
        return list(expand(nodes))
    except ValueError as error:
        raise TwinError(f"--node {nodes!r} is not a list of nodes ({error})") from None


def _show_kinds(as_json: bool) -> None:
    if as_json:
        rows = [
            {"name": kind.name, "target": kind.target, "does": kind.does, "heals": kind.heals}
            for kind in KINDS.values()
        ]
        emit({"schema": FAULT_SCHEMA, "kinds": rows}, indent=2)
        return
    from rich.table import Table

    table = Table("kind", "of a", "what it does", "heal", box=None, header_style="bold", pad_edge=False)
    for kind in KINDS.values():
        table.add_row(kind.name, kind.target, kind.does, kind.heals)
    drawing_console(markup=True).print(table)

"""How a launch is shown: its checks, its plan."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tr11ops.base.invocation import for_this_card
from tr11ops.cli.common import named_card, say
from tr11ops.cli.context import emit
from tr11ops.cli.terminal import hanging
from tr11ops.launch.first_data import data_commands
from tr11ops.launch.plan import plan_value
from tr11ops.launch.shortage import is_short, report_shortage

if TYPE_CHECKING:
    from tr11ops.launch.session import LaunchJob, LaunchView
    from tr11ops.runcard.card import RunCard
    from tr11ops.runcard.check import PreflightCheck
    from tr11ops.rundir.paths import Submission


LAUNCH_SCHEMA = 1
MARK_WIDTH = 10  # columns of a check's word and of the space behind it


_MARKS = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "refused": ("refused", "red"),
    "unknown": ("unknown", "magenta"),
}


def show_checks(checks: Iterable[PreflightCheck]) -> None:
    """One line each, in order, on one stream: what is refused is read among the rest."""
    for check in checks:
        word, colour = _MARKS[check.level]
        typer.echo(f"{typer.style(f'{word:>8}', fg=colour)}  {hanging(for_this_card(str(check)), MARK_WIDTH)}")


def checks_value(checks: Iterable[PreflightCheck]) -> list[dict[str, str]]:
    """The checks for a machine."""
    return [
        {"level": check.level.value, "name": check.name, "text": check.text, "fix": for_this_card(check.fix)}
        for check in checks
    ]


def show_first_data(card: RunCard) -> None:
    """How the data of a card is made that is not there at all."""
    commands = data_commands(card, Path.cwd())
    if commands:
        typer.echo('\nIts data can be made here; texts of your own go where --input is,\none {"text": ...} a line:')
        for command in commands:
            typer.echo(f"  {command}")


def show_view(view: LaunchView, dry_run: bool, as_json: bool) -> None:
    """The checks and the plan, or as JSON where it was refused."""
    if as_json:
        if view.exit_code:
            print_json(view, (), dry_run, as_json)
            for check in view.faults:
                say(f"tr11: {check}")
        return
    show_checks(view.checks)
    if view.rows:
        typer.echo("")
        for name, value in view.rows:
            typer.echo(f"{name:>14}  {value}")
    if dry_run and not view.exit_code:
        typer.echo("\nnothing was submitted (--dry-run)")
    elif view.exit_code:
        typer.echo("nothing was submitted")


def print_json(
    view: LaunchView,
    records: tuple[Submission, ...],
    dry_run: bool,
    as_json: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """With --json: the checks, the plan and what was submitted, as one object."""
    if not as_json:
        return

    value: dict[str, Any] = {
        "schema": LAUNCH_SCHEMA,
        "exit_code": view.exit_code,
        "dry_run": dry_run,
        "submitted": bool(records),
        "job_id": records[0].job_id if records else None,
        "jobs": [record.job_id for record in records],
        "scheduler": records[0].scheduler if records else None,
        "chain": view.chain.kind,
        "checks": checks_value(view.checks),
        "plan": plan_value(view.plan) if view.plan else None,
        **(more or {}),
    }
    emit(value)


def tell_of_shortage(job: LaunchJob, view: LaunchView, run: str | None) -> None:
    """Raise the alert where what was submitted waits for nodes that cannot be used, and say who hears of it."""
    outcome = report_shortage(job, time.time(), named_card(run)) if is_short(view) else None
    if outcome is None:
        return
    told = sorted({address for message in outcome.messages for address in message.to})
    if told:
        say(f"too few nodes can be used: told {', '.join(told)}")
    for note in outcome.notes:
        say(f"tr11: {note}")

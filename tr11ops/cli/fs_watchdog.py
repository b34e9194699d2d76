"""`tr11 fs-watchdog`: how full the card's file systems are, when they will be full, and whose files
no one can use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from shlex import join
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from tr11ops.base.errors import Refusal, SourceError
from tr11ops.base.observed import Unknown, known
from tr11ops.cli.common import is_terminal, named_card, say, timeout_option
from tr11ops.cli.context import JSON, RunContext, emit
from tr11ops.filesystems.look import SOURCES, look_at
from tr11ops.filesystems.report import judge, lines, value
from tr11ops.filesystems.rights import read_drift
from tr11ops.filesystems.runner import NicedRunner
from tr11ops.logs.lines import plain
from tr11ops.observe.look import facts_of
from tr11ops.runcard.slurm_syntax import parse_time_limit
from tr11ops.rundir.disk_usage import append_usage, read_usage
from tr11ops.watchdog.filesystem_alerts import alert

if TYPE_CHECKING:
    from tr11ops.filesystems.look import FilesystemResult
    from tr11ops.filesystems.report import FilesystemReport
    from tr11ops.runcard.card import RunCard
    from tr11ops.rundir.disk_usage import Usage
    from tr11ops.rundir.paths import RunDirectory

RIGHTS_SECONDS = 300.0  # for the walk over the run's files
DAILY_HOURS = 24
TIME_SHARE = 0.75  # of the periodic job's time limit that the slow sources may take

MOST_SECONDS = 7 * 86400.0  # of one `du`


def fs_watchdog(
    context: Annotated[RunContext, JSON],
    *,
    no_email: Annotated[
        bool,
        typer.Option("--no-email", help="Tell it here alone: the alerts are left as they are."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", "-d", help="Show every measure, not only what is wrong.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what would be asked; ask nothing and keep nothing."),
    ] = False,
    timeout: Annotated[
        float | None,
        timeout_option("For `du`; default: 3/4 of the periodic job's limit.", unit="m"),
    ] = None,
) -> None:
    """Are the file systems getting full? Asks each `filesystems` table's source and keeps a sample
    of it.

    Exit code 0: none is full; 1: one is; 2: wrong usage; 3: nothing could be observed.

    Examples:
      tr11 fs-watchdog --debug
      tr11 fs-watchdog --no-email --json
    """
    if timeout is not None and not 0 < timeout <= MOST_SECONDS:
        raise Refusal(
            f"--timeout {timeout:g} s: must be above 0 and at most 10080 minutes", exit_code=2
        )
    card = context.card
    if dry_run:
        _show_plan(card, context.as_json)
        return
    directory = context.directory
    report, looks = _report(card, directory, seconds_of(card, timeout))
    kept = _keep(directory, looks, report.time)
    context.emit({**value(report), "kept": not kept}, map(plain, lines(report, debug)))
    if kept:
        say(kept)
    if not no_email and directory.exists:
        for note in _alert(directory, card, looks, report.time, named_card(context.run)):
            say(note)
    raise typer.Exit(report.exit_code)


def seconds_of(card: RunCard, seconds: float | None) -> float:
    """What `du` may take: within the time limit of the periodic job that this is part of."""
    if seconds is not None:
        return seconds
    cron = card.cron
    return TIME_SHARE * parse_time_limit(
        cron.daily_time_limit if cron.filesystem_hours >= DAILY_HOURS else cron.hourly_time_limit
    )


def _report(
    card: RunCard, directory: RunDirectory, seconds: float
) -> tuple[FilesystemReport, tuple[FilesystemResult, ...]]:
    now = time.time()
    with _waiting(f"asking {len(card.filesystems)} file systems"):
        looks = look_at(card.filesystems, NicedRunner(os.environ), now, seconds)
    rules = facts_of(card).operation.filesystems
    report = judge(card.run.name, rules, looks, known(read_usage(directory), ()), now)
    if directory.exists:
        with _waiting("looking at the rights of the run's files"):
            report = replace(
                report,
                drift=read_drift(directory.root, min(seconds, RIGHTS_SECONDS), time.monotonic),
            )
    return report, looks


def _keep(directory: RunDirectory, looks: tuple[FilesystemResult, ...], now: float) -> str:
    """Append the samples; returns why they could not be kept, "" when they were. A full disk must
    still be told.
    """
    samples = _samples(looks)
    if not samples:
        return ""
    if not directory.exists:
        return f"{directory.root} is not there: this look is not kept for the forecast"
    try:
        append_usage(directory, samples, now)
    except OSError as error:
        return f"this look could not be kept for the forecast: {error.filename or ''}: {error.strerror or error}"
    return ""


def _alert(
    directory: RunDirectory,
    card: RunCard,
    looks: tuple[FilesystemResult, ...],
    now: float,
    typed: str,
) -> tuple[str, ...]:
    """Hand the samples to the alerts; returns what went wrong there."""
    samples = _samples(looks)
    if not samples:
        return ()

    return alert(directory, card, samples, now, typed).notes


def _samples(looks: tuple[FilesystemResult, ...]) -> list[Usage]:
    return [look.usage for look in looks if not isinstance(look.usage, Unknown)]


def _show_plan(card: RunCard, as_json: bool) -> None:
    plan: dict[str, list[str]] = {}
    for section in card.filesystems:
        try:
            plan[section.name] = [
                join(command) for command in SOURCES[section.source].commands(section)
            ]
        except SourceError as error:
            raise Refusal(f"[[filesystems]] {section.name}: {error}", exit_code=2) from None
    if as_json:
        emit({"schema": 1, "dry_run": True, "commands": plan})
        return
    for name, commands in plan.items():
        typer.echo("\n".join(f"{name}: would run {command}" for command in commands))
    typer.echo("nothing was asked, nothing was kept (--dry-run)")


@contextmanager
def _waiting(text: str) -> Iterator[None]:
    """A sign that something goes on, where a person looks: du may take hours."""
    if not is_terminal():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield

"""`tr11 perms`: are a run's files usable for its group; `tr11 fs-watchdog`: are disks full."""

from __future__ import annotations

import grp
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shlex import join
from typing import Annotated, Any

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from tr11ops.base.errors import SourceError, WrongUsage
from tr11ops.base.observed import Unknown, known, observed
from tr11ops.base.units import escaped
from tr11ops.cli.common import is_terminal, named_card, timeout_option
from tr11ops.cli.progress import bar_of
from tr11ops.cli.runner import DRY_RUN, JSON, Change, Outcome, RunContext, unasked
from tr11ops.filesystems.look import FilesystemResult, NicedRunner, look_at, read_drift
from tr11ops.filesystems.report import FilesystemReport, HeldBytes, judge, lines, value
from tr11ops.filesystems.sources import SOURCES
from tr11ops.logs.lines import plain
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.sections import parse_time_limit
from tr11ops.rundir.checkpoint_scan import list_rows
from tr11ops.rundir.disk_usage import Usage, append_usage, read_usage
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.permissions import PermissionTally, PermissionWalk
from tr11ops.watchdog.situation import alert
from trainer.contract.files import user_of

# ----------------------------------------------------------------------------- fs-watchdog
RIGHTS_SECONDS = 300.0  # for the walk over the run's files
DAILY_HOURS = 24
TIME_SHARE = 0.75  # of the periodic job's time limit that the slow sources may take

MOST_SECONDS = 7 * 86400.0  # of one `du`


def fs_watchdog(
    context: Annotated[RunContext, JSON, DRY_RUN],
    *,
    no_email: Annotated[
        bool,
        typer.Option("--no-email", help="Tell it here alone: the alerts are left as they are."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", "-d", help="Show every measure, not only what is wrong.")
    ] = False,
    timeout: Annotated[
        float | None,
        timeout_option("For `du`; default: 3/4 of the periodic job's limit.", unit="m"),
    ] = None,
) -> Change:
    """Are the file systems getting full? Asks each `filesystems` table's source and keeps a sample
    of it.

    Exit code 0: none is full; 1: one is; 2: wrong usage; 3: nothing could be observed.

    Examples:
      tr11 fs-watchdog --debug
      tr11 fs-watchdog --no-email --json
    """
    if timeout is not None and not 0 < timeout <= MOST_SECONDS:
        raise WrongUsage(f"--timeout {timeout:g} s: must be above 0 and at most 10080 minutes")
    card = context.card

    def apply() -> Outcome:
        directory = context.directory
        report, looks = _report(card, directory, seconds_of(card, timeout))
        unkept = _keep(directory, looks, report.time)
        notes = [unkept] if unkept else []
        samples = _samples(looks)
        if samples and not no_email and directory.exists:
            typed = named_card(context.run)
            notes += alert(directory, card, samples=samples, now=report.time, typed=typed).notes
        return Outcome(
            {**value(report), "kept": not unkept},
            map(plain, lines(report, debug)),
            notes,
            exit_code=report.exit_code,
        )

    return unasked(apply, partial(_planned, card))


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
    report = judge(
        card.run.name,
        card.filesystems,
        looks=looks,
        history=known(read_usage(directory), ()),
        now=now,
    )
    if directory.exists:
        with _waiting("looking at the rights of the run's files"):
            report = replace(
                report,
                drift=read_drift(directory.root, min(seconds, RIGHTS_SECONDS), time.monotonic),
                held=_held(directory),
            )
    return report, looks


def _held(directory: RunDirectory) -> HeldBytes | None:
    """What is held of another trainer's checkpoints; None where that is nothing, or cannot be seen."""
    rows = known(observed(list_rows, directory.paths.checkpoints, None), [])
    held = [row for row in rows if row.foreign]
    if not held:
        return None
    freed = sum(row.freed for row in held)
    return HeldBytes(len(held), sum(row.bytes for row in held), freed)


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


def _samples(looks: tuple[FilesystemResult, ...]) -> list[Usage]:
    return [look.usage for look in looks if not isinstance(look.usage, Unknown)]


def _planned(card: RunCard) -> Outcome:
    """What would be asked."""
    plan: dict[str, list[str]] = {}
    for section in card.filesystems:
        try:
            plan[section.name] = [
                join(command) for command in SOURCES[section.source].commands(section)
            ]
        except SourceError as error:
            raise WrongUsage(f"[[filesystems]] {section.name}: {error}") from None
    would = [
        f"{name}: would run {command}" for name, commands in plan.items() for command in commands
    ]
    return Outcome(
        {"schema": 1, "dry_run": True, "commands": plan},
        (*would, "nothing was asked, nothing was kept (--dry-run)"),
    )


@contextmanager
def _waiting(text: str) -> Iterator[None]:
    """A sign that something goes on, where a person looks: du may take hours."""
    if not is_terminal():
        yield
        return

    with Console(stderr=True).status(text):
        yield


PERMS_SCHEMA = 1
SHOWN = 10

app = typer.Typer(
    name="perms",
    help="""Rights of the run's files: its group reads and writes every file; folders hand the group on (setgid).

    Examples:
      tr11 perms check
      tr11 perms fix --dry-run
    """,
    no_args_is_help=True,
)

PathsArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FOLDER]...",
        help="Trees to look at. Else the run's directory, and perms.folders.",
    ),
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="NAME",
        help="The group of everything. Else perms.group of the card, else each tree's own.",
    ),
]


@app.command()
def check(
    context: Annotated[RunContext, JSON],
    paths: PathsArgument = None,
    *,
    group: GroupOption = None,
) -> Outcome:
    """Look at every file and folder; change nothing. Links are not followed.

    Exit code 0: all is well; 1: something is wrong; 2: wrong usage.

    Examples:
      tr11 perms check
      tr11 perms check $SCRATCH/checkpoints $WORK/code --group six
    """
    return _walk(paths, group, context, repair=False)


@app.command()
def fix(
    context: Annotated[RunContext, JSON, DRY_RUN],
    paths: PathsArgument = None,
    *,
    group: GroupOption = None,
) -> Outcome:
    """Give what you own to the group: files g+rw, folders g+rwxs. Of what others own, it says whom
    to ask.

    Exit code 0: all is well now; 1: something is left; 2: wrong usage.

    Examples:
      tr11 perms fix --dry-run
      tr11 perms fix
    """
    return _walk(paths, group, context, repair=not context.dry_run)


def _walk(
    paths: list[Path] | None,
    group: str | None,
    context: RunContext,
    *,
    repair: bool,
) -> Outcome:
    card = None
    if not paths or context.has_card:
        card = context.card
    roots = paths or ([context.directory.root, *map(Path, card.perms.folders)] if card else [])
    option, wanted_group = "--group", group
    if group is None and card is not None and card.perms.group is not None:
        option, wanted_group = "perms.group", card.perms.group
    missing = [str(root) for root in roots if not root.is_dir()]
    if missing:
        raise WrongUsage(f"{missing[0]} is not a folder: nothing was looked at")
    values, shown, left = [], list[str](), 0
    for root in roots:
        if wanted_group is not None:
            wanted = _group_number(option, wanted_group)
        else:
            wanted = root.stat().st_gid
        walk = PermissionWalk(root, wanted, repair)
        with _progress(root) as show:
            tally = walk.run(show)
        left += tally.left
        values.append(_value(root, wanted, tally))
        shown += _lines(root, wanted, tally, repair=repair, dry_run=context.dry_run)
    document = {"schema": PERMS_SCHEMA, "mended": repair, "left": left, "trees": values}
    return Outcome(document, shown, exit_code=1 if left else 0)


def _group_number(option: str, name: str) -> int:
    try:
        if name.isascii() and name.isdecimal():
            return int(name)
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise WrongUsage(f"{option} {name}: there is no such group here") from None


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


@contextmanager
def _progress(root: Path) -> Iterator[Callable[[PermissionTally], None]]:
    """A bar of the folders that are done, of those found so far; nothing where no one looks."""
    if not is_terminal():
        yield lambda tally: None
        return

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
    )
    with bar_of(*columns) as bar:
        task = bar.add_task(escaped(str(root)), total=1, text="")

        def show(tally: PermissionTally) -> None:
            text = f"{tally.entries:,} entries, {tally.wrong:,} wrong"
            bar.update(task, total=tally.folders_found, completed=tally.folders, text=text)

        yield show


def _lines(
    root: Path, group: int, tally: PermissionTally, repair: bool, dry_run: bool
) -> Iterator[str]:
    name, user = _group_name(group), os.geteuid()
    yield f"{escaped(str(root))}: {tally.entries:,} files and folders, group {name}: {tally.wrong:,} wrong"
    for fault in tally.examples[:SHOWN]:
        if fault.owner == user:
            whose = ""
        else:
            whose = f", of {user_of(fault.owner)}"
        error = ""
        if fault.error:
            error = f": {fault.error}"
        yield f"  {escaped(fault.path)}: {', '.join(fault.what)}{whose}{error}"
    if len(tally.examples) > SHOWN:
        yield f"  ... and {tally.left - SHOWN:,} more (--json names {len(tally.examples):,})"
    mine = tally.wrong - sum(tally.others.values())
    if repair and tally.repaired:
        yield f"  {tally.repaired:,} repaired"
    elif mine:
        verb = "would repair" if dry_run else "`tr11 perms fix` repairs"
        yield f"  {verb} {mine - (tally.failed if repair else 0):,} of yours"
    for owner, count in tally.others.most_common():
        yield f"  {count:,} of {user_of(owner)}: ask {user_of(owner)} to type `tr11 perms fix`, or move them aside"


def _value(root: Path, group: int, tally: PermissionTally) -> dict[str, Any]:
    return {
        "root": str(root),
        "group": _group_name(group),
        "entries": tally.entries,
        "folders": tally.folders,
        "wrong": tally.wrong,
        "mended": tally.repaired,
        "failed": tally.failed,
        "unreadable": tally.unreadable,
        "others": {user_of(owner): count for owner, count in tally.others.most_common()},
        "examples": [
            {
                "path": fault.path,
                "owner": user_of(fault.owner),
                "what": list(fault.what),
                "error": fault.error,
            }
            for fault in tally.examples
        ],
    }

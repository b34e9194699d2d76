"""`tr11 perms check|fix`: are a run's files readable and writable for its whole group, and can they
be made so?
"""

from __future__ import annotations

import grp
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.base.errors import Refusal
from tr11ops.cli.common import is_terminal
from tr11ops.cli.context import JSON, RunContext, emit
from tr11ops.launch.extra_observations import user_of
from tr11ops.rundir.permissions import PermissionWalk

if TYPE_CHECKING:
    from tr11ops.rundir.permissions import PermissionTally

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
        show_default=False,
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
) -> None:
    """Look at every file and folder; change nothing. Links are not followed.

    Exit code 0: all is well; 1: something is wrong; 2: wrong usage.

    Examples:
      tr11 perms check
      tr11 perms check $SCRATCH/checkpoints $WORK/code --group six
    """
    raise typer.Exit(_walk(paths, group, context, repair=False, dry_run=False))


@app.command()
def fix(
    context: Annotated[RunContext, JSON],
    paths: PathsArgument = None,
    *,
    group: GroupOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be changed; change nothing.")
    ] = False,
) -> None:
    """Give what you own to the group: files g+rw, folders g+rwxs. Of what others own, it says whom
    to ask.

    Exit code 0: all is well now; 1: something is left; 2: wrong usage.

    Examples:
      tr11 perms fix --dry-run
      tr11 perms fix
    """
    raise typer.Exit(_walk(paths, group, context, repair=not dry_run, dry_run=dry_run))


def _walk(
    paths: list[Path] | None,
    group: str | None,
    context: RunContext,
    *,
    repair: bool,
    dry_run: bool,
) -> int:
    if paths and not context.has_card:
        card = None
    else:
        card = context.card
    roots = paths or ([context.directory.root, *map(Path, card.perms.folders)] if card else [])
    option, wanted_group = "--group", group
    if group is None and card is not None and card.perms.group is not None:
        option, wanted_group = "perms.group", card.perms.group
    missing = [str(root) for root in roots if not root.is_dir()]
    if missing:
        raise Refusal(f"{missing[0]} is not a folder: nothing was looked at", exit_code=2)
    values, left = [], 0
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
        if not context.as_json:
            for line in _lines(root, wanted, tally, repair, dry_run, os.geteuid()):
                typer.echo(line)
    if context.as_json:
        emit({"schema": PERMS_SCHEMA, "mended": repair, "left": left, "trees": values})
    if left:
        return 1
    return 0


def _group_number(option: str, name: str) -> int:
    try:
        if name.isascii() and name.isdecimal():
            return int(name)
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise Refusal(f"{option} {name}: there is no such group here", exit_code=2) from None


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
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(_shown(str(root)), total=1, text="")

        def show(tally: PermissionTally) -> None:
            text = f"{tally.entries:,} entries, {tally.wrong:,} wrong"
            bar.update(task, total=tally.folders_found, completed=tally.folders, text=text)

        yield show


def _lines(
    root: Path, group: int, tally: PermissionTally, repair: bool, dry_run: bool, user: int
) -> Iterator[str]:
    name = _group_name(group)
    yield f"{_shown(str(root))}: {tally.entries:,} files and folders, group {name}: {tally.wrong:,} wrong"
    for fault in tally.examples[:SHOWN]:
        if fault.owner == user:
            whose = ""
        else:
            whose = f", of {user_of(fault.owner)}"
        error = ""
        if fault.error:
            error = f": {fault.error}"
        yield f"  {_shown(fault.path)}: {', '.join(fault.what)}{whose}{error}"
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


def _shown(path: str) -> str:
    """A path without characters that a terminal obeys or an encoding refuses."""
    shown = "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in path
    )
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")

"""`tr11 perms check|fix`: are a run's files readable and writable for its whole group, and can they be made so?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import JsonOption, Refusal, RunOption, SetOption, directory_of, has_card, is_terminal, read_card

if TYPE_CHECKING:
    from tr11ops.perms import Tally

PERMS_SCHEMA = 1
SHOWN = 10

app = typer.Typer(
    name="perms",
    help="Rights of the run's files: its group reads and writes every file; folders hand the group on (setgid).",
    no_args_is_help=True,
)

PathsArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FOLDER]...", show_default=False, help="Trees to look at. Else the run's directory, and perms.folders."
    ),
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        "--group", metavar="NAME", help="The group of everything. Else perms.group of the card, else each tree's own."
    ),
]


@app.command()
def check(
    paths: PathsArgument = None,
    *,
    group: GroupOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Look at every file and folder; change nothing. Links are not followed.

    Exit code 0: all is well; 1: something is wrong; 2: wrong usage.

    [bold]Examples[/bold]

      tr11 perms check

      tr11 perms check $SCRATCH/checkpoints $WORK/code --group six
    """
    raise typer.Exit(_walk(paths, group, run, overrides, mend=False, dry_run=False, as_json=as_json))


@app.command()
def fix(
    paths: PathsArgument = None,
    *,
    group: GroupOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be changed; change nothing.")] = False,
    run: RunOption = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Give what you own to the group: files g+rw, folders g+rwxs. Of what others own, it says whom to ask.

    Exit code 0: all is well now; 1: something is left; 2: wrong usage.

    [bold]Examples[/bold]

      tr11 perms fix --dry-run

      tr11 perms fix
    """
    raise typer.Exit(_walk(paths, group, run, overrides, mend=not dry_run, dry_run=dry_run, as_json=as_json))


def _walk(
    paths: list[Path] | None,
    group: str | None,
    run: str | None,
    overrides: list[str] | None,
    *,
    mend: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    import os

    from tr11ops.perms import PermissionWalk

    card = None if paths and not has_card(run) else read_card(run, overrides)
    roots = paths or ([directory_of(card).root, *map(Path, card.perms.folders)] if card else [])
    option, wanted_group = "--group", group
    if group is None and card is not None and card.perms.group is not None:
        option, wanted_group = "perms.group", card.perms.group
    missing = [str(root) for root in roots if not root.is_dir()]
    if missing:
        raise Refusal(f"{missing[0]} is not a folder: nothing was looked at", exit_code=2)
    values, left = [], 0
    for root in roots:
        wanted = _group_number(option, wanted_group) if wanted_group is not None else root.stat().st_gid
        walk = PermissionWalk(root, wanted, mend)
        with _progress(root) as show:
            tally = walk.run(show)
        left += tally.left
        values.append(_value(root, wanted, tally))
        if not as_json:
            for line in _lines(root, wanted, tally, mend, dry_run, os.geteuid()):
                typer.echo(line)
    if as_json:
        typer.echo(json.dumps({"schema": PERMS_SCHEMA, "mended": mend, "left": left, "trees": values}, indent=1))
    return 1 if left else 0


def _group_number(option: str, name: str) -> int:
    import grp

    try:
        return int(name) if name.isascii() and name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise Refusal(f"{option} {name}: there is no such group here", exit_code=2) from None


def _group_name(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


@contextmanager
def _progress(root: Path) -> Iterator[Callable[[Tally], None]]:
    """A bar of the folders that are done, of those found so far; nothing where nobody looks."""
    if not is_terminal():
        yield lambda tally: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(_shown(str(root)), total=1, text="")

        def show(tally: Tally) -> None:
            text = f"{tally.entries:,} entries, {tally.wrong:,} wrong"
            bar.update(task, total=tally.folders_found, completed=tally.folders, text=text)

        yield show


def _lines(root: Path, group: int, tally: Tally, mend: bool, dry_run: bool, user: int) -> Iterator[str]:
    from tr11ops.launch.surroundings import user_of

    name = _group_name(group)
    yield f"{_shown(str(root))}: {tally.entries:,} files and folders, group {name}: {tally.wrong:,} wrong"
    for fault in tally.examples[:SHOWN]:
        whose = "" if fault.owner == user else f", of {user_of(fault.owner)}"
        error = f": {fault.error}" if fault.error else ""
        yield f"  {_shown(fault.path)}: {', '.join(fault.what)}{whose}{error}"
    if len(tally.examples) > SHOWN:
        yield f"  ... and {tally.left - SHOWN:,} more (--json names {len(tally.examples):,})"
    mine = tally.wrong - sum(tally.others.values())
    if mend and tally.mended:
        yield f"  {tally.mended:,} mended"
    elif mine:
        verb = "would mend" if dry_run else "`tr11 perms fix` mends"
        yield f"  {verb} {mine - (tally.failed if mend else 0):,} of yours"
    for owner, count in tally.others.most_common():
        yield f"  {count:,} of {user_of(owner)}: ask {user_of(owner)} to type `tr11 perms fix`, or move them aside"


def _value(root: Path, group: int, tally: Tally) -> dict[str, Any]:
    from tr11ops.launch.surroundings import user_of

    return {
        "root": str(root),
        "group": _group_name(group),
        "entries": tally.entries,
        "folders": tally.folders,
        "wrong": tally.wrong,
        "mended": tally.mended,
        "failed": tally.failed,
        "unreadable": tally.unreadable,
        "others": {user_of(owner): count for owner, count in tally.others.most_common()},
        "examples": [
            {"path": fault.path, "owner": user_of(fault.owner), "what": list(fault.what), "error": fault.error}
            for fault in tally.examples
        ],
    }


def _shown(path: str) -> str:
    """A path without characters that a terminal obeys or an encoding refuses."""
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in path)
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")

"""What the commands share: the options that name a run, how the run is found, how they speak; and the
terminal that a screen is drawn on, whatever COLUMNS and LINES say.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import typer

from tr11ops.base.deadline import NOT_WITHIN
from tr11ops.base.errors import Late, Refusal, Unobserved, WrongUsage
from tr11ops.base.invocation import for_this_card
from tr11ops.base.units import MINUTE, plain, shows_unicode, span_seconds, timestamp, wrapped
from tr11ops.cli import completion
from tr11ops.observe.readers import CLUSTERS, check_scheduler_word
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.table import Table

    from tr11ops.runcard.card import RunCard
    from tr11ops.status.rows import Screen


T = TypeVar("T")
RunOption = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="CARD",
        help="Run card: a path, or a shipped card's name. Else $TR11_RUN, else tr11.toml here.",
        autocompletion=completion.cards,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Override one key of the card; may be repeated."
    ),
]
SchedulerOption = Annotated[
    str,
    typer.Option(
        "--scheduler",
        metavar="slurm|local|auto",
        help="Which scheduler to talk to; auto: Slurm where there is one.",
        autocompletion=completion.words(*CLUSTERS),
        callback=check_scheduler_word,
    ),
]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        "--endpoint", metavar="URL", help="With --remote: another hub. Else $HF_ENDPOINT."
    ),
]
VariantOption = Annotated[
    str | None,
    typer.Option(
        "--variant", metavar="NAME", help="With --remote: one of several trainings in it."
    ),
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="TIME",
        help="Only what came after: 12h, 3d, 14:30, 2022-05-01, 2022-05-01T14:30.",
    ),
]


AttemptOption = Annotated[
    str | None,
    typer.Option("--job", "--attempt", metavar="ID", help="This attempt of the run, e.g. 1234_7."),
]
RootsOption = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[ROOT]...",
        parser=Path,  # click's own asks the file system, which may hang
        help="Folders; else this one.",
    ),
]


def timeout_option(text: str, unit: str = "s") -> Any:
    """`--timeout`, everywhere a length of time: 90s, 45m, 2h. A bare number is in `unit`."""
    words = {"s": "seconds", "m": "minutes"}[unit]
    return typer.Option(
        "--timeout",
        parser=partial(span_option, unit=unit),
        metavar="TIME",
        help=f"{text} 90s, 45m; bare: {words}.",
    )


def span_option(text: object, unit: str = "s") -> float:
    """Seconds of an option that takes a length of time; a bare number is in `unit`. Raises
    BadParameter.
    """
    try:
        return span_seconds(str(text), unit)
    except ValueError as error:
        raise typer.BadParameter(f"{text} {error}") from None


DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the journal.")
]
AsShownOption = Annotated[
    str, typer.Option("--as-shown", metavar="MARK", hidden=True)  # of programs that ask a person
]
ActingForOption = Annotated[
    str, typer.Option("--acting-for", metavar="NAME", hidden=True)  # of a server, for its visitor
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object with a schema number.")
]


def card_path(run: str | None) -> Path:
    """Where the run card lies. Raises CardError when there is none."""
    from tr11ops.runcard.card import find_card

    return find_card(run, os.environ, Path.cwd())


def has_card(run: str | None) -> bool:
    """Whether the command line means any card: --run, $TR11_RUN, or tr11.toml in this folder."""
    return (
        run is not None or bool(os.environ.get("TR11_RUN")) or (Path.cwd() / "tr11.toml").is_file()
    )


def named_card(run: str | None) -> str:
    """What a message read in another shell must give as `--run`; "" where the folder's own card is
    meant.
    """
    return run or os.environ.get("TR11_RUN", "")


def read_card(
    run: str | None, overrides: Sequence[str] | None = None, keep_undefined: bool = False
) -> RunCard:
    """The card that the command line means, completed and checked. Raises CardError with every
    problem.
    """
    from tr11ops.runcard.card import load_card

    return load_card(card_path(run), overrides or (), os.environ, keep_undefined=keep_undefined)


def directory_of(card: RunCard) -> RunDirectory:
    """The run directory that a card names; nothing is created or looked at."""
    return RunDirectory(card.paths, card.kill_switch)


def in_time(work: Callable[[], T], seconds: float | None = None, hint: str = "") -> T:
    """What `work` returns, within the deadline of a look. Raises Refusal with exit code 3 where it
    is late.

    `hint` says what may be done all the same.
    """
    from tr11ops.base.deadline import LOOK_SECONDS, within

    limit = LOOK_SECONDS if seconds is None else seconds
    try:
        return within(limit, work)
    except Late:
        raise Unobserved(f"nothing was seen {NOT_WITHIN.format(limit)}{hint}") from None


def require_directory(directory: RunDirectory) -> None:
    """Refuse where nothing was launched: for commands that refuse wrong options first."""
    if not in_time(lambda: directory.exists):
        raise nothing_there(directory, 1)


def nothing_there(directory: RunDirectory, code: int = 1) -> Refusal:
    """Where a run directory is expected and there is none."""
    text = f"{directory.root} does not exist: nothing was launched from this card here; check --run and the folder"
    return Refusal(text, exit_code=code)


def not_mounted(directory: RunDirectory, why: str) -> Refusal:
    """Where the run directory that is seen is not the one that the jobs were queued from: all of it
    is unknown.
    """
    from tr11ops.observe.jobs import ways_to_see

    return Unobserved(
        f"nothing was changed: {why}; mount it, then type this again ({ways_to_see(directory)})",
    )


def in_time_for_all(work: Callable[[], T]) -> T:
    """As `in_time`, for work that reads a run's whole past. The run directory has answered before."""
    from tr11ops.base.deadline import PASS_SECONDS

    return in_time(work, PASS_SECONDS)


def require_file(path: Path, option: str) -> None:
    """Refuse what cannot become a file: a rename onto a device would replace it. Raises Refusal."""
    if not path.parent.is_dir():
        raise WrongUsage(f"{option} {path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise WrongUsage(f"{option} {path}: is not a file")


def write_output(path: Path, text: str) -> None:
    """Put a file in place, whole or not at all. Raises Refusal where the place refuses it."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise Refusal(f"--output {path}: could not be written: {error.strerror or error}") from None


_LABEL = re.compile(r"[a-z ]{1,12}: {2,}")  # of a line in columns, such as `jobs:       none`


def say(text: str) -> None:
    """One line for the person; on stderr, so that stdout stays the command's result. A terminal
    gets it in as many as it takes, under its label where it has one.
    """
    line = for_this_card(text)
    if "\n" not in line:
        label = _LABEL.match(line)
        line = hanging(line, len(label[0]) if label else 2, sys.stderr)
    print(line, file=sys.stderr, flush=True)


def is_terminal() -> bool:
    """True when a person can be asked: both sides of the conversation are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def require_answer(yes: bool) -> None:
    """Raises Refusal where someone must be asked and no one can be; for what takes long before it
    can ask.
    """
    if not yes and not is_terminal():
        raise WrongUsage("no one can be asked here (not a terminal): add --yes")


def agree(question: str, yes: bool) -> None:
    """Ask before something is done. Raises Refusal when the answer is no, or when no one can be
    asked.
    """
    require_answer(yes)
    if not yes and not typer.confirm(question, default=False, err=True):
        raise Refusal("nothing was changed")


NARROWEST, USUAL, WIDEST = 40, 80, 132


def drawing_console(markup: bool = False) -> Console:
    """Standard output. COLUMNS=0 is no width: 80 is taken; less than 40 is drawn as 40."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=markup)
    width = console.width
    if width < NARROWEST:
        console.width = NARROWEST if width > 0 else USUAL
    return console


def lines_to_fill(console: Console) -> int | None:
    """Lines of a screen that leaves its first line in sight above the prompt; None where nothing
    scrolls away.
    """
    height = console.height
    if console.is_terminal and not console.is_dumb_terminal and height > 1:
        return height - 1
    return None


def hanging(text: str, indent: int, stream: TextIO | None = None, piped: int | None = None) -> str:
    """The text for a terminal: broken between words, what follows the first line moved in by
    `indent` columns.

    Paths and options stay whole. Where `stream` (standard output) is no terminal it is as wide as
    `piped`; without that a line is one line there.
    """
    width = piped
    if (stream or sys.stdout).isatty():
        width = max(NARROWEST, shutil.get_terminal_size((USUAL, 24)).columns)
    if width is None:
        return text
    return f"\n{' ' * indent}".join(wrapped(text, width=width - indent))


def draws_unicode() -> bool:
    """Whether more than ASCII can be shown. (A live view puts a stand-in without an encoding in
    place of `stdout`.)
    """
    return shows_unicode(os.environ, getattr(sys.__stdout__, "encoding", None))


def status_screen(width: int | None, height: int | None) -> Screen:
    """The room for a status; without a width, that of this process's terminal."""
    from tr11ops.status.rows import Screen

    wide = drawing_console().width if width is None else width
    return Screen(min(WIDEST, max(NARROWEST, wide)), draws_unicode(), height=height)


def plain_text(text: str) -> str:
    """Text of others, safe to be shown."""
    return plain(text, draws_unicode())


def local_time(seconds: float | None) -> str:
    """A point of time to the minute, in local time; "" for none."""
    if seconds is not None:
        return timestamp(seconds, None, MINUTE)
    return ""


NARROW_SENTENCE = 24  # columns; in less a sentence is not read


def table(*columns: str) -> Table:
    """An empty table without lines: columns of text, which reads well in a mail too."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(columns):
        last = place == len(columns) - 1
        made.add_column(name, overflow="fold" if last else "ellipsis", no_wrap=not last)
    return made


def show(made: Table, width: int = 200) -> None:
    """Print a table; where no terminal limits it, as wide as it needs to be, `width` at most.
    Sentences that have no room in the last column stand below their row.
    """
    console = drawing_console()
    if not console.is_terminal:
        console.width = width
    columns = [[str(column.header), *map(str, column.cells)] for column in made.columns]
    widths = [max(map(len, column)) for column in columns]
    taken = sum(widths[:-1]) + 2 * (len(widths) - 2)  # two blanks between columns
    has_room = taken + 2 + min(widths[-1], NARROW_SENTENCE) <= console.width
    if has_room or taken > console.width:
        console.print(made)
        return
    for number, row in enumerate(zip(*columns, strict=True)):
        cells = (f"{text:<{room}}" for text, room in zip(row[:-1], widths[:-1], strict=True))
        style = "" if number else made.header_style
        console.print("  ".join(cells).rstrip(), style=style, markup=False, highlight=False)
        if number and row[-1]:
            for line in wrapped(row[-1], width=console.width - 4):
                console.print(f"    {line}", markup=False, highlight=False)

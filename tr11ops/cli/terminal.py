"""The terminal that a screen is drawn on, whatever COLUMNS and LINES say; the tables and words that
are shown there.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tr11ops.status.rows import Screen

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
    return f"\n{' ' * indent}".join(
        textwrap.wrap(text, width - indent, break_long_words=False, break_on_hyphens=False)
    )


def draws_unicode() -> bool:
    """Whether more than ASCII can be shown. (A live view puts a stand-in without an encoding in
    place of `stdout`.)
    """
    from tr11ops.base.glyphs import shows_unicode

    return shows_unicode(os.environ, getattr(sys.__stdout__, "encoding", None))


def status_screen(width: int | None, height: int | None) -> Screen:
    """The room for a status; without a width, that of this process's terminal."""
    from tr11ops.status.rows import Screen

    wide = drawing_console().width if width is None else width
    return Screen(min(WIDEST, max(NARROWEST, wide)), draws_unicode(), height=height)


def plain_text(text: str) -> str:
    """Text of others, safe to be shown."""
    from tr11ops.base.glyphs import plain

    return plain(text, draws_unicode())


def local_time(seconds: float | None) -> str:
    """A point of time to the minute, in local time; "" for none."""
    from tr11ops.base.units import MINUTE, timestamp

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
        if number:
            for line in textwrap.wrap(row[-1], console.width - 4, break_on_hyphens=False):
                console.print(f"    {line}", markup=False, highlight=False)

"""The terminal that a screen is drawn on: a console that always has room, whatever COLUMNS and LINES say."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

NARROWEST, USUAL = 40, 80


def drawing_console(markup: bool = False) -> Console:
    """Standard output. COLUMNS=0 is no width: 80 is taken; less than 40 is drawn as 40."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=markup)
    width = console.width
    if width < NARROWEST:
        console.width = NARROWEST if width > 0 else USUAL
    return console


def lines_to_fill(console: Console) -> int | None:
    """Lines of a screen that leaves its first line in sight above the prompt; None where nothing scrolls away."""
    height = console.height
    return height - 1 if console.is_terminal and not console.is_dumb_terminal and height > 1 else None


def hanging(text: str, indent: int) -> str:
    """The text for a terminal: broken between words, what follows the first line moved in by `indent` columns.

    Paths and options stay whole. Unchanged where standard output is no terminal: there a line is one line.
    """
    if not sys.stdout.isatty():
        return text
    width = max(NARROWEST, shutil.get_terminal_size((USUAL, 24)).columns) - indent
    return f"\n{' ' * indent}".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))

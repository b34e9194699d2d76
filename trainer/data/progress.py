"""Progress for people, on the standard error, so that the standard output stays for machines."""

from __future__ import annotations

import re

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from trainer.contract.errors import UsageError


def progress_bar(*fields: str) -> Progress:
    """A bar of bytes, followed by `fields` such as `{task.fields[tokens]} tokens`, else by the
    bytes.

    On a terminal alone: elsewhere nothing is printed.
    """
    console = Console(stderr=True)
    amounts: list[ProgressColumn] = [TextColumn(field) for field in fields]
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TaskProgressColumn(),
        *(amounts or [DownloadColumn()]),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        disable=not console.is_terminal,
    )


def say(text: str) -> None:
    """One line for people on the standard error, as it is."""
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


def inclusive_range(text: str) -> tuple[int, int]:
    """FIRST-LAST, both ends included. Raises UsageError."""
    match = re.fullmatch(r"(\d+)-(\d+)", text, re.ASCII)
    if match is None or int(match.group(1)) > int(match.group(2)):
        raise UsageError(
            f"{text!r} is not a range: write FIRST-LAST, both ends included, such as 0-15"
        )
    return int(match.group(1)), int(match.group(2))

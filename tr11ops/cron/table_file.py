"""A run's lines in a table of cron (or of scrontab), between two marks; all other lines stay as they are. Pure."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Sequence
from functools import reduce

from tr11ops.base.errors import TableError
from tr11ops.cron.jobs import PeriodicJob
from tr11ops.cron.schedule import Daily, Schedule


def marks(mark: str, run: str) -> tuple[bytes, bytes]:
    """The first and the last line of a run's block, without line ends; `mark` tells runs apart."""
    name = "".join(character if character.isprintable() else "?" for character in run)
    return f"# tr11 cron {mark} begin: {name}".encode(), f"# tr11 cron {mark} end".encode()


def replaced(table: bytes, mark: str, run: str, lines: Sequence[str]) -> bytes:
    """The table with these lines as the run's block; with no lines, without the block.

    Raises TableError when the marks in the table are not one block: a person has edited it.
    """
    first, last = marks(mark, run)
    begin_word, end_word = first.partition(b": ")[0], last
    rows = table.splitlines(keepends=True)
    begins = [index for index, row in enumerate(rows) if row.startswith(begin_word)]
    ends = [index for index, row in enumerate(rows) if row.rstrip(b"\r\n") == end_word]
    if (len(begins), len(ends)) not in {(0, 0), (1, 1)} or (begins and begins[0] > ends[0]):
        raise TableError(
            f"the lines {first.decode()!r} and {last.decode()!r} are not one block any more: "
            "edit the table by hand, remove what is left of them, and try again"
        )
    block = [first, *(line.encode("utf-8", "surrogateescape") for line in lines), last] if lines else []
    new = [row + b"\n" for row in block]
    if begins:
        return b"".join([*rows[: begins[0]], *new, *rows[ends[0] + 1 :]])
    gap = [b"\n"] if new and table and not table.endswith(b"\n") else []
    return b"".join([*rows, *gap, *new])


def difference(before: bytes, after: bytes) -> str:
    """What changes, as `diff -u` shows it; "" when nothing does."""
    old, new = (text.decode("utf-8", "backslashreplace").splitlines() for text in (before, after))
    return "\n".join(difflib.unified_diff(old, new, "as it is", "as it will be", lineterm="", n=1))


def cron_command(words: Sequence[str]) -> str:
    """A command for a line of cron: quoted for the shell, and for cron, which takes a bare % as a line end.

    Raises TableError for what cannot stand on a line.
    """
    text = " ".join(shlex.quote(word) for word in words)
    if any(character in text for character in "\n\r\0"):
        raise TableError(f"{text!r} cannot stand in a table of cron: use a path without line ends")
    return text.replace("%", r"\%")


def minutes_field(schedules: Sequence[Schedule], now: float, offset_minutes: int) -> str:
    """The minutes of an hour at which every point of these schedules is met, as cron writes them.

    `offset_minutes` is what this machine's clock is ahead of UTC. Points between whole minutes are met a minute late.
    """
    steps = [60]
    for schedule in schedules:
        minutes = schedule.period_seconds / 60
        if isinstance(schedule, Daily):
            steps.append(60)
        elif minutes.is_integer():
            steps.append(max(1, int(minutes)))
        else:
            steps.append(1)
        steps.append((int(schedule.after(now) // 60) + offset_minutes) % 60)
    step = reduce(math.gcd, steps)
    if step == 60:
        return "0"
    return "*" if step == 1 else f"*/{step}"


def cron_lines(command: Sequence[str], jobs: Sequence[PeriodicJob], now: float, offset_minutes: int) -> list[str]:
    """The run's line: what is due is decided by the command, so the line is only often enough."""
    minutes = minutes_field([job.schedule for job in jobs], now, offset_minutes)
    return [f"{minutes} * * * * {cron_command(command)}"]

"""Waiting for what another process does: for the event, never for a length of time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

PATIENCE_SECONDS = 600.0  # far beyond need, also on a slow machine with other work
QUIET_SECONDS = 150.0  # the same where nothing else works there: three times the longest whole test
LONGEST_PAUSE = 1.0  # between two questions, whatever an answer takes
Found = TypeVar("Found")


def until(
    condition: Callable[[], Found],
    what: object = "what was waited for",
    *,
    seconds: float | None = None,
    pause: float = 0.05,
    context: Callable[[], object] | None = None,
) -> Found:
    """Ask `condition` every `pause` seconds until it is true; returns what it said. One that takes
    long to answer is asked less often, so that whoever waits leaves the cores to what is waited for.

    Raises AssertionError, with `what` and, of that moment, `context()` and the load, once `seconds`
    have passed; where none are given, once PATIENCE_SECONDS have, or QUIET_SECONDS but for the
    machine's other work.
    """
    longest, longest_quiet = PATIENCE_SECONDS, QUIET_SECONDS
    if seconds is not None:
        longest = longest_quiet = seconds
    began = looked = asked = time.monotonic()
    quiet = 0.0
    while not (found := condition()):
        now = time.monotonic()
        quiet += (now - looked) / crowding()
        looked = now
        if now - began > longest or quiet > longest_quiet:
            shown = f"\n{context()}" if context is not None else ""
            raise AssertionError(
                f"not within {now - began:.0f} s: {what}; load {os.getloadavg()}{shown}"
            )
        time.sleep(max(pause, min(2 * (now - asked), LONGEST_PAUSE)))
        asked = time.monotonic()
    return found


def crowding() -> float:
    """How many programs there are for each core, at least 1: so many times slower may all be."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def end_of_file(path: Path, lines: int = 40) -> str:
    """The last lines of a log, for a report."""
    return (
        "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
        if path.exists()
        else f"no {path.name}"
    )


def is_gone(pid: int) -> bool:
    """Whether a process has ended, though no one may have waited for it yet."""
    try:
        return psutil.Process(pid).status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return True

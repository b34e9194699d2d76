"""Waiting for what another process does: for the event, never for a length of time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

PATIENCE_SECONDS = 600.0  # far beyond need, also on a slow machine with other work
Found = TypeVar("Found")


def until(
    condition: Callable[[], Found],
    what: object = "what was waited for",
    *,
    seconds: float = PATIENCE_SECONDS,
    pause: float = 0.05,
    context: Callable[[], object] | None = None,
) -> Found:
    """Ask `condition` every `pause` seconds until it is true; returns what it said.

    Raises AssertionError once `seconds` have passed, with `what` and, of that moment, `context()`
    and the load.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            shown = f"\n{context()}" if context is not None else ""
            raise AssertionError(
                f"not within {seconds:.0f} s: {what}; load {os.getloadavg()}{shown}"
            )
        time.sleep(pause)
    return found


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

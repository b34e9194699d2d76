"""Killing a process between any two of its effects on files, for tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tr11ops.checkpoints.prune import PruneBusy

EFFECTS = ("os.rename", "os.remove", "os.rmdir", "os.link", "os.mkdir", "open")  # what changes something on disk


def in_a_child(work: Callable[[], object]) -> int:
    """Run `work` in a fork of this process; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except PruneBusy:
        os._exit(7)
    except BaseException as error:  # it must not go on as a second pytest
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(9)


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(number: int, work: Callable[[], object]) -> Callable[[], object]:
    """`work`, killed just before its effect of that number on the file system."""
    count = iter(range(1, 1 << 20))

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        is_effect = event in EFFECTS and (event != "open" or bool(int(arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)))  # type: ignore[call-overload]
        if is_effect and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        sys.addaudithook(audit)
        work()

    return run


def effects_of(work: Callable[[], object], place: Path) -> int:
    """How many effects the whole of it has."""
    seen: list[str] = []

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event in EFFECTS and (event != "open" or bool(int(arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))):  # type: ignore[call-overload]
            seen.append(event)

    def run() -> None:
        sys.addaudithook(audit)
        work()
        (place / "count").write_text(str(len(seen)))

    assert wait(in_a_child(run)) == 0
    return int((place / "count").read_text())

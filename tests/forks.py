"""Work in a fork of the test's process, which may be killed between any two of its effects."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

FILE_EFFECTS = frozenset({"os.rename", "os.remove", "os.rmdir", "os.link", "os.mkdir"})


def forked(work: Callable[[], object]) -> int:
    """Do `work` in a fork of this process; its process id, at once. It exits with 0, or with 1
    where `work` raises.
    """
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # it must not go on as a second pytest
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return child


def exit_code(child: int) -> int:
    """Of a fork, once it has ended; -9 when it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def changes_files(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an audit event changes something on disk."""
    return event in FILE_EFFECTS or (
        event == "open" and bool(int(arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
    )


def die_at(number: int, is_effect: Callable[[str, tuple[Any, ...]], bool] = changes_files) -> None:
    """Have this process killed (-9) just before its effect of this number, from 1.

    An effect is an audit event, with its arguments, for which `is_effect` holds.
    """
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if is_effect(event, arguments):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_at(
    number: int,
    work: Callable[[], object],
    is_effect: Callable[[str, tuple[Any, ...]], bool] = changes_files,
) -> bool:
    """Do `work` in a fork that dies as `die_at` says; False when it had fewer effects, and was
    done.
    """

    def doomed() -> None:
        die_at(number, is_effect)
        work()

    code = exit_code(forked(doomed))
    assert code in (0, -signal.SIGKILL), code
    return code != 0

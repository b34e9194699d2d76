"""One process that has imported everything forks another for each action, which dies (-9) at a
given call.

A JSON object on a line of its input is an action, one on a line of its output how that ended.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Self


class ForkingProcess:
    """The process that forks; `module` is run as a program, and serves."""

    module = ""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def order(self, **deed: Any) -> tuple[int, int]:
        """Have an action done; its exit code (-9: it was killed), and the number that it returned
        (0 if killed).
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(deed) + "\n")
        self._process.stdin.flush()
        code, number = json.loads(self._process.stdout.readline())
        return code, number


def serve(do: Callable[[dict[str, Any]], int]) -> None:
    """Do each action of the input in a process of its own."""
    for line in sys.stdin:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(theirs, str(do(json.loads(line))).encode())
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(theirs)
        told = os.read(ours, 100)
        os.close(ours)
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), int(told or 0)]), flush=True)


def die_at(at: int, calls: Iterable[tuple[Any, str]]) -> list[int]:
    """Die as the `at`-th of these calls is made (odd) or right after it (even); 0: never. Counts
    them in what it returns.
    """
    numbers, made = itertools.count(1), [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            made[0] = number = next(numbers)
            if number == at and at % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*given, **options)
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for owner, name in calls:
        setattr(owner, name, counted(getattr(owner, name)))
    return made

"""Copies to a folder in processes that are killed (-9) at a given call of the file system.

One process imports everything and forks one for each copy: a JSON object on a line of its input is a copy, one on a
line of its output whether that was killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLS = ("open", "pwrite", "fsync", "replace", "rename", "link", "mkdir", "unlink")


class Nursery:
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tr11ops.backup.copy_nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def killed(self, at: int, store: Path, checkpoint: Path, format: str, **settings: int) -> bool:
        """Copy a checkpoint in a process that is killed as it makes its `at`-th call that changes files, or right
        after it. False: it made fewer calls, and ended well.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"at": at, "store": str(store), "checkpoint": str(checkpoint), "format": format, "settings": settings}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        status: int = json.loads(self._process.stdout.readline())
        assert status in (0, -signal.SIGKILL), status
        return status != 0

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


def _arm(at: int) -> None:
    made = iter(range(1, 10**9))

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            number = next(made)
            if number == at and at % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*given, **options)
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def main() -> None:
    from tests.tr11ops.backup.copy_cases import copy, make_archive, quick

    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                _arm(order["at"])
                archive, checkpoint = make_archive(Path(order["store"])), Path(order["checkpoint"])
                copy(archive, checkpoint, quick(**order["settings"]), format=order["format"])
                os._exit(0)
            except BaseException as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(1)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()

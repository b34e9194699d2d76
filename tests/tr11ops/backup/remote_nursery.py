"""Copies to a bucket, and restores, in processes that are killed (-9) at a given moment.

One process imports everything and forks one for each deed: a JSON object on a line of its input is a deed, one on a
line of its output how that ended.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Nursery:
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tr11ops.backup.remote_nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def copy(self, at: int, **what: Any) -> int:
        """Copy a checkpoint and die at the `at`-th moment (0: never); returns how many there were, -1 when killed."""
        return self._do("copy", at, what)

    def restore(self, at: int, **what: Any) -> int:
        """Restore one, and the same."""
        return self._do("restore", at, what)

    def _do(self, deed: str, at: int, what: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"deed": deed, "at": at, **what}) + "\n")
        self._process.stdin.flush()
        moments: int = json.loads(self._process.stdout.readline())
        return moments

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


def _arm(at: int) -> list[int]:
    """Count each request's beginning, its answer and each change of a file here; die at one of them."""
    import http.client

    moments = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            moments[0] += 1
            number = moments[0]
            if number == at and at % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*given, **options)
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for owner, name in (
        (http.client.HTTPConnection, "send"),
        (http.client.HTTPConnection, "getresponse"),
        *((os, name) for name in ("replace", "rename", "unlink", "pwrite", "fsync", "mkdir")),
    ):
        setattr(owner, name, counted(getattr(owner, name)))
    return moments


def _copy(what: dict[str, Any]) -> int:
    from tests.tr11ops.backup.copy_cases import copy, quick
    from tr11ops.backup.remote import open_remote

    moments = _arm(what["at"])
    archive = open_remote(what["url"], what["options"], run="tr11-test", environment={"XDG_STATE_HOME": what["state"]})
    copy(archive, Path(what["folder"]), quick(parallel=what["parallel"]), format=what["format"])
    return moments[0]


def _restore(what: dict[str, Any]) -> int:
    from tests.tr11ops.backup.copy_cases import make_archive, quick
    from tr11ops.backup.receipts import read_receipt
    from tr11ops.backup.restore import restore_checkpoint

    archive = make_archive(Path(what["store"]))
    receipt = read_receipt(archive, what["location"])
    assert receipt is not None
    moments = _arm(what["at"])
    restore_checkpoint(archive, receipt, Path(what["into"]), quick(parallel=2))
    return moments[0]


def main() -> None:
    for module in ("gcsfs.core", "tests.tr11ops.backup.copy_cases", "tr11ops.backup.remote", "tr11ops.backup.restore"):
        importlib.import_module(module)
    for line in sys.stdin:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                what = json.loads(line)
                moments = _copy(what) if what["deed"] == "copy" else _restore(what)
                os.write(theirs, str(moments).encode())
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
        os.close(theirs)
        told = os.read(ours, 100)
        os.close(ours)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(-1 if killed else int(told), flush=True)


if __name__ == "__main__":
    main()

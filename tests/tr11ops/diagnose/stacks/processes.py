"""Real worker processes, and whether this user may look into them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import psutil
import pytest

from tr11ops.diagnose.stacks.node import FoundWorker, read_worker

SLEEPS = "import time; print(flush=True); time.sleep(3000)"


@contextmanager
def started(*programs: tuple[str, Mapping[str, str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Python programs with exactly these variables and PATH, each of which has printed a line;
    killed at the end.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for code, own in programs:
            environment = {"PATH": os.environ["PATH"], **own}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
                )
            )
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline(), "it ended at once"
        yield processes
    finally:
        for process in processes:
            for child in [*_children(process.pid), process]:
                child.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _children(pid: int) -> list[psutil.Process]:
    """A data loader's processes outlive it where they sleep."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@cache
def _no_right() -> str:
    with started((SLEEPS, {})) as [process]:
        trouble = read_worker(FoundWorker(0, "here", process.pid)).trouble
    return trouble if trouble.startswith("no right") else ""


def require_stacks() -> None:
    """Skip where the kernel lets this user look into no process of his own, as in some containers."""
    if _no_right():
        pytest.skip(_no_right())

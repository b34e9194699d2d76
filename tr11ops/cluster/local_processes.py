"""Processes of the embedded scheduler: who descends from whom, and ending all of a task."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

import psutil

from tr11ops.base.processes import is_living
from tr11ops.cluster.local_records import (
    SUPERVISOR_MODULE,
    ProcessMark,
    is_alive,
)

KILL_SECONDS = 10.0  # what is still there after so many has hung in the kernel


def is_supervisor(process: psutil.Process) -> bool:
    """Is it a supervisor? A job may submit jobs; their supervisors then run below it, and do not
    end with it.
    """
    with contextlib.suppress(psutil.AccessDenied):  # of another user, so not one of ours
        return process.cmdline()[1:3] == ["-m", SUPERVISOR_MODULE]
    return False


def descendants(pid: int) -> list[psutil.Process]:
    """All living descendants of a process, but no supervisor and nothing below one."""
    parents: dict[int, int] = {}
    found: list[psutil.Process] = []
    spared: set[int] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                parents[child.pid] = child.ppid()
                if not is_living(child):
                    continue
                if is_supervisor(child):
                    spared.add(child.pid)
                found.append(child)

    def lineage(process: psutil.Process) -> set[int]:
        line = set()
        current = process.pid
        while current in parents and current not in line:
            line.add(current)
            current = parents[current]
        return line

    return [process for process in found if not (spared and lineage(process) & spared)]


def with_environment(wanted: dict[str, str]) -> list[psutil.Process]:
    """All living processes that were started with exactly these variables; never the caller."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if process.pid != os.getpid() and all(
                environment.get(key) == value for key, value in wanted.items()
            ):
                found.append(process)
    return found


def send(processes: Collection[psutil.Process], number: int) -> None:
    """Signal each that is still there and is ours to signal."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


def kill_task_leftovers(wanted: dict[str, str], step: ProcessMark | None) -> int:
    """KILL everything that a task left behind, by its keeper's tree and by its environment. Returns
    what remains.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        left = with_environment(wanted)
        if step is not None and is_alive(step):
            left += [*descendants(step.pid), psutil.Process(step.pid)]
        send(left, signal.SIGKILL)
        if not left or time.monotonic() > deadline:
            return len(left)
        time.sleep(0.02)

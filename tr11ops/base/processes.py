"""Programs of this machine: asked for what they print; and process trees: everything a child left
behind is found, and ended for certain.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import psutil

from tr11ops.base.errors import Unanswered
from trainer.contract.record import Record

# Asking a program of this machine something: what it printed, or why it could not be asked.


class ProbeOutput(Record):
    """How a command ended and what it wrote."""

    status: int
    text: str
    error: str = ""


class LocalCommands:
    """This machine, on which programs can be run."""

    def command(
        self,
        arguments: Sequence[str],
        seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> ProbeOutput:
        """Run a command, with exactly this environment; where none is given, in this process's, but
        told in English. Raises FileNotFoundError when there is none, Unanswered when it takes too long.
        """
        if environment is None:
            environment = {**os.environ, "LC_ALL": "C"}
        # A session of its own: what the command starts is ended with it, and holds no pipe open.
        process = subprocess.Popen(
            list(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel: no one can end it
                process.communicate(timeout=1.0)
            raise Unanswered(f"{arguments[0]}: no answer within {seconds:g} s") from None
        return ProbeOutput(
            process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
        )


_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
# a node agent whose batch controller is gone ends its workers
CONTROLLER_VARIABLE = "TR11_CONTROLLER_PID"


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that none can escape
    `end_descendants`.

    Linux only (prctl); elsewhere it does nothing, and only living parents' children are found.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def show_as(name: str) -> None:
    """Show this process under another name in process lists. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def die_with_parent(number: int) -> None:
    """Ask the kernel to send this process a signal when its parent dies, however that dies. Linux
    only.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def begin_launcher() -> None:
    """In the child, before a launcher such as torchrun: USR1 asks the trainer to save, is sent to all
    of a step, and would end a launcher, which does not handle it. Workers take it over when they
    install their own; until then the stop request stands for it.

    And when its keeper is killed, the launcher ends its workers: not every Slurm finds processes that
    were left in a session of their own.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent(signal.SIGTERM)


def exit_status(code: int) -> int:
    """A child's return code as a shell gives it: 128 + n when signal n ended it."""
    if code >= 0:
        return code
    return 128 - code


def leave(status: int) -> NoReturn:
    """End this process as `sys.exit` does. The interpreter does not take apart what was made here
    first: that is a sixth of what a short process costs.
    """
    gc.freeze()
    sys.exit(status)


def signal_children(pid: int, number: int) -> None:
    """Send a signal to the direct children of a process."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            _send(child, number)


def end_descendants(grace_seconds: float) -> list[int]:
    """End every process below this one: TERM, then KILL after the grace. Returns the pids that had
    to be ended.
    """
    ended: list[int] = []
    deadline = time.monotonic() + grace_seconds
    for number in (signal.SIGTERM, signal.SIGKILL):
        while living := _living_descendants():
            for process in living:
                if process.pid not in ended:
                    ended.append(process.pid)
                _send(process, number)
            psutil.wait_procs(living, timeout=min(0.5, max(0.05, deadline - time.monotonic())))
            if number == signal.SIGTERM and time.monotonic() >= deadline:
                break
            if number == signal.SIGKILL and time.monotonic() >= deadline + 10:
                return ended  # unkillable (in the kernel): nothing more can be done from here
    return ended


def _living_descendants() -> list[psutil.Process]:
    try:
        found = psutil.Process().children(recursive=True)
    except psutil.Error:
        return []
    return [process for process in found if is_living(process)]


def is_living(process: psutil.Process) -> bool:
    """Whether it runs: one that ended, and that its parent has not collected yet, does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _send(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        return

"""One child process: it starts only when its claim names it, its output is taken as it comes, and it ends in time."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

from tr11ops.cluster.local_records import ProcessMark
from tr11ops.cluster.process_marks import is_alive

Ending: TypeAlias = Literal["by itself", "time", "asked"]
GRACE_SECONDS = 10.0  # between TERM and KILL
DRAIN_SECONDS = 5.0  # for output of what the child left behind
LOOK_SECONDS = 0.05

# The child waits for a line before it becomes the command. If who started it dies before the claim names the child, the
# line never comes, and the child leaves: no job can run that no claim knows of.
_GATE = 'read -r go || exit 125; exec "$@" </dev/null'


class Child:
    """A command in a process group of its own, not started before `go`. Raises OSError when it cannot be made."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, feed: Callable[[bytes], None]
    ):
        self._feed = feed
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GATE, "tr11-cron", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._take_output, name="output", daemon=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def go(self) -> None:
        """Open the gate."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # killed already: the exit code says so
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()
        self._pump.start()

    def wait(self, seconds: float, must_end: Callable[[], bool]) -> tuple[int, Ending]:
        """Wait for the end, at most so long, or until `must_end`; it is then made to end.

        Returns the exit code, below 0 for a signal, and how it came to its end. Nothing of its group is left.
        """
        ending: Ending = "by itself"
        deadline = time.monotonic() + seconds
        while not self._has_ended():
            is_late = time.monotonic() >= deadline
            if is_late or must_end():
                ending = "time" if is_late else "asked"
                self._end()
            time.sleep(LOOK_SECONDS)
        _signal_group(self.pid, signal.SIGKILL)  # what it left behind; its number is free only when it is reaped
        code = self._process.wait()
        self._pump.join(DRAIN_SECONDS)
        return code, ending

    def discard(self) -> None:
        """End a child whose gate was not opened."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        _signal_group(self.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def _end(self) -> None:
        _signal_group(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        _signal_group(self.pid, signal.SIGKILL)

    def _take_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while data := os.read(stream.fileno(), 65536):
                self._feed(data)


def end_orphan(child: ProcessMark | None) -> None:
    """End what a killed owner left running, and its group."""
    if child is None or not is_alive(child):
        return
    _signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    if is_alive(child):
        _signal_group(child.pid, signal.SIGKILL)


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)

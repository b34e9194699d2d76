"""One task's keeper: a small process between the supervisor and the batch script.

It is the parent of everything the script starts, whatever that does to get away, so that nothing
survives the task: when the supervisor closes the control pipe, or dies, the keeper kills what is
left and goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tr11ops.base.processes import adopt_orphans, show_as
from tr11ops.cluster.base import JobState
from tr11ops.cluster.local_processes import descendants, send
from tr11ops.cluster.local_records import ProcessMark, mark
from trainer.contract.record import Record


class BatchCommand(Record):
    """What a keeper runs: the batch script with its interpreter, and its surroundings."""

    arguments: list[str]
    environment: dict[str, str]
    working_directory: Path
    output: Path
    claims: tuple[int, ...] = ()  # descriptors that the keeper holds as long as it lives


class StepHandle(Record):
    """The supervisor's handle on a keeper. `status` gives JSON lines, `control` takes signal names."""

    pid: int
    mark: ProcessMark
    status: int
    control: int


@dataclass
class RunningTask:
    """A task's processes and clocks, in the supervisor alone. Times are of the monotonic clock."""

    raw_id: int
    step: StepHandle
    limit_at: float
    warn_at: float | None
    ending: JobState | None = None  # why it is being ended, if not by itself
    kill_at: float | None = None
    batch: ProcessMark | None = None  # until it is written down
    outcome: tuple[int | None, int | None] | None = None  # the batch script's exit code and signal
    error: str = ""  # why the batch script could not start
    is_closed: bool = False  # the keeper was told to go
    is_lost: bool = False  # the keeper died by itself
    has_exited: bool = False  # the keeper is gone
    buffer: bytes = b""
    claims: tuple[socket.socket, ...] = ()  # on its GPUs, until nothing of it is left

    def verdict(self) -> dict[str, object]:
        """How a task ended, as changes of its record."""
        code, number = self.outcome or (None, None)
        if self.ending is not None:
            state = self.ending
            reason = "TimeLimit" if self.ending is JobState.TIMEOUT else ""
        elif self.outcome is None:
            state = JobState.NODE_FAIL
            reason = "KeeperDied"
        elif self.error:
            state = JobState.FAILED
            reason = f"the batch script could not start: {self.error}"
        elif number is not None:
            state = JobState.FAILED
            reason = f"RaisedSignal:{number}"
        elif code == 0:
            state = JobState.COMPLETED
            reason = ""
        else:
            state = JobState.FAILED
            reason = "NonZeroExitCode"
        end = {
            "state": state,
            "reason": reason,
            "end_time": time.time(),
            "exit_code": code,
            "exit_signal": number,
        }
        return {**end, "step": None, "batch": None}


def start_step(command: BatchCommand) -> StepHandle:
    """Start a task's keeper and, in it, the batch script.

    Its first status line is `{"batch": PID}` or `{"error": why}`, its last `{"code": N}` or
    `{"signal": N}`.
    """
    status_read, status_write = os.pipe()
    control_read, control_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _close_all_but({status_write, control_read, *command.claims})
            _keep(command, status_write, control_read)
            code = 0
        except BaseException as error:  # the child must never run on into the supervisor's loop
            print(f"keeper: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(status_write)
    os.close(control_read)
    os.set_blocking(status_read, False)
    return StepHandle(pid, mark(pid), status_read, control_write)


def _close_all_but(kept: set[int]) -> None:
    """Other tasks' pipes and the supervisor's lock must not live on in this process."""
    for descriptor in [int(entry.name) for entry in Path("/dev/fd").iterdir()]:
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _keep(command: BatchCommand, status: int, control: int) -> None:
    os.setsid()
    adopt_orphans()
    show_as("tr11-task")
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_DFL)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def tell(message: dict[str, object]) -> None:
        # the supervisor is dead: the control pipe says so next
        with contextlib.suppress(BrokenPipeError):
            os.write(status, json.dumps(message).encode() + b"\n")

    try:
        with command.output.open("wb") as stream:
            batch = subprocess.Popen(
                command.arguments,
                env=command.environment,
                cwd=command.working_directory,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:  # ValueError: an environment that no process can have
        tell(
            {
                "error": f"{error.strerror}: {error.filename or command.output}"
                if isinstance(error, OSError)
                else str(error)
            }
        )
        return
    tell({"batch": batch.pid})
    is_running = True
    while True:
        ready, _, _ = select.select([control, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            for pid, wait_status in _reap():
                if pid == batch.pid:
                    is_running = False
                    code = os.waitstatus_to_exitcode(wait_status)
                    tell({"code": code} if code >= 0 else {"signal": -code})
        if control in ready:
            message = os.read(control, 4096)
            if not message:
                break
            for name in message.decode().split():
                if is_running:
                    os.kill(batch.pid, signal.Signals[name])
    while left := descendants(os.getpid()):
        send(left, signal.SIGKILL)
        time.sleep(0.02)
        _reap()


def _reap() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, wait_status))
    return ended

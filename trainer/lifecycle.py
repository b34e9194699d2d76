"""When a trainer stops, and what it leaves behind: kill switch, signals, limits, heartbeat, end marker.

No torch here. Each rank casts votes (`Lifecycle.votes`), the loop takes their element-wise maximum over all ranks, and
`decide` turns the agreed votes into one decision: so no rank can leave while another goes on (spec/tr11.md 1.12).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

from trainer.contract import (
    EXIT_ERROR,
    EXIT_REFUSED,
    EndMarker,
    Heartbeat,
    RunPaths,
    host_name,
    write_heartbeat,
    write_json,
)

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True)
class Attempt:
    """Who started this trainer: read from the environment that the node agent (or a person) gave it.

    `stop_request` is a file whose existence asks for save-and-exit: unlike a signal it cannot come before a worker has
    installed its handler.
    """

    job_id: str
    launch: int
    stop_request: Path | None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Attempt:
        request = environment.get("TR11_STOP_REQUEST")
        return cls(
            job_id=environment.get("TR11_JOB_ID") or environment.get("SLURM_JOB_ID") or f"pid-{os.getppid()}",
            launch=int(environment.get("TR11_LAUNCH", "1")),
            stop_request=Path(request) if request else None,
        )


@dataclass(frozen=True)
class Limits:
    """The stop conditions of one attempt. `start_time` is the earliest rank's start, seconds since the epoch."""

    kill_switch: Path
    exit_duration_minutes: float | None
    exit_interval: int | None
    start_time: float


@dataclass(frozen=True)
class Decision:
    """Why the training stops now, and the line that says so in the log."""

    reason: str
    restart: bool
    line: str


class SignalFlag:
    """Remembers the first stop signal. The handler only sets a flag: the loop acts at its next safe point."""

    def __init__(self) -> None:
        self.received: int | None = None

    def install(self) -> None:
        """Take over USR1, TERM and INT. Call it before slow imports: their default action ends the process."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number


KILL_SWITCH, SIGNAL, DURATION = range(3)


def votes(rank: int, limits: Limits, flag: SignalFlag, stop_request: Path | None, now: float) -> tuple[int, int, int]:
    """This rank's votes: (kill switch, signal, duration). Only rank 0 looks at files; one stat each.

    The signal vote is the signal's number, so that the agreed value can be named in the log.
    """
    kill = requested = 0
    if rank == 0:
        kill = int(os.path.lexists(limits.kill_switch))
        requested = signal.SIGUSR1 if stop_request is not None and os.path.lexists(stop_request) else 0
    over = limits.exit_duration_minutes is not None and (now - limits.start_time) / 60 > limits.exit_duration_minutes
    return kill, flag.received or requested, int(over)


def decide(agreed: Sequence[int], limits: Limits, iteration: int, trained: bool, now: float) -> Decision | None:
    """The one decision that follows from the agreed votes; None: go on.

    `trained` says whether this attempt has done a step: the exit interval counts only then, or a resume at a multiple
    would leave at once. The strongest reason wins: a kill switch also keeps later tasks from training.
    """
    stamp = datetime.fromtimestamp(now).strftime("%Y-%m-%d %H:%M:%S")
    if agreed[KILL_SWITCH]:
        return Decision("kill-switch", False, f"[Detected kill switch at {limits.kill_switch}. Exiting] datetime: {stamp} ")
    if agreed[SIGNAL]:
        name = signal.Signals(agreed[SIGNAL]).name
        return Decision("signal", True, f"[exiting program on signal {name} at iteration {iteration}] datetime: {stamp} ")
    if agreed[DURATION]:
        minutes = (now - limits.start_time) / 60
        return Decision("exit-duration", True, f"[exiting program after {minutes} minutes] datetime: {stamp} ")
    if trained and limits.exit_interval is not None and iteration % limits.exit_interval == 0:
        return Decision("exit-interval", True, f"[exiting program at iteration {iteration}] datetime: {stamp} ")
    return None


class HeartbeatWriter:
    """Writes this rank's heartbeat: at once when the phase changes, else at most every HEARTBEAT_SECONDS."""

    def __init__(self, paths: RunPaths, rank: int, job_id: str, clock: Callable[[], float] = time.time):
        self._path = paths.heartbeat(rank)
        self._rank = rank
        self._job_id = job_id
        self._clock = clock
        self._host = host_name()
        self._phase = ""
        self._written = 0.0
        self._complained = False

    def beat(self, phase: str, iteration: int) -> None:
        """Report the phase. A file system that refuses it must not stop a training: it is said once on stderr."""
        now = self._clock()
        if phase == self._phase and now - self._written < HEARTBEAT_SECONDS:
            return
        self._phase, self._written = phase, now
        beat = Heartbeat(self._rank, self._host, os.getpid(), phase, iteration, now, self._job_id)
        try:
            write_heartbeat(self._path, beat)
        except OSError as error:
            if not self._complained:
                self._complained = True
                print(f"heartbeat cannot be written: {error}", flush=True)


def write_end_marker(paths: RunPaths, attempt: Attempt, decision_reason: str, restart: bool, iteration: int,
                     checkpoint_step: int | None, message: str) -> EndMarker:
    """Write the attempt's end marker (one rank only, after the last save). Raises OSError when it cannot be written."""
    marker = EndMarker(
        reason=decision_reason, iteration=iteration, checkpoint_step=checkpoint_step, restart=restart,
        message=message, time=time.time(), host=host_name(), job_id=attempt.job_id, launch=attempt.launch,
    )
    write_json(paths.end_marker(attempt.job_id), asdict(marker))
    return marker


def write_failure(paths: RunPaths, attempt: Attempt, rank: int, error: BaseException, iteration: int) -> None:
    """Keep one rank's failure: `state/attempts/JOB/failures/rank-R.json`, the evidence for "who failed first"."""
    write_json(
        paths.attempt(attempt.job_id) / "failures" / f"rank-{rank}.json",
        {
            "rank": rank, "host": host_name(), "time": time.time(), "iteration": iteration, "launch": attempt.launch,
            "error": f"{type(error).__name__}: {error}", "traceback": "".join(traceback.format_exception(error)),
        },
    )


def exit_process(code: int, close: Callable[[], None], patience_seconds: float = 20.0) -> None:
    """End this process for certain: try `close`, but whatever thread or library hangs, leave within the patience.

    The original sometimes stayed after its clean exit and held 384 GPUs (spec/tr11.md 1.12); `os._exit` cannot.
    """
    timer = threading.Timer(patience_seconds, os._exit, args=(code,))
    timer.daemon = True
    timer.start()
    try:
        close()
    except Exception as error:  # the work is saved and the verdict written: a failing clean-up changes neither
        print(f"clean-up failed: {error}", flush=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def exit_code(reason: str) -> int:
    """The process exit status for an end reason."""
    return {"error": EXIT_ERROR, "refused": EXIT_REFUSED}.get(reason, 0)

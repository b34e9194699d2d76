"""When a trainer stops, and what it leaves behind: kill switch, signals, limits, heartbeat, end
marker.

No torch here. Rank 0 looks for signals (`look`), all ranks hear what it saw
(`trainer.control.control_signals`), and `decide` turns that into the same decision on every rank:
so none can leave while another goes on.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from trainer.contract.attempt import (
    STOP_SIGNALS,
    AttemptIdentity,
    EndMarker,
    Heartbeat,
    PhaseWriter,
    tell,
    write_heartbeat,
)
from trainer.contract.documents import document
from trainer.contract.errors import NodeFilesError
from trainer.contract.files import host_name, write_json
from trainer.contract.lease import Lease
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

if TYPE_CHECKING:
    from trainer.config.card import TrainerConfig

HEARTBEAT_SECONDS = 1.0


class StopConditions(Record):
    """The stop conditions of one attempt. `start_time` is the earliest rank's start, seconds since
    the epoch.
    """

    kill_switch: Path
    exit_duration_minutes: float | None
    exit_interval: int | None
    start_time: float

    @classmethod
    def of(cls, config: TrainerConfig, start_time: float) -> StopConditions:
        """The card's."""
        run = config.run
        return cls(config.kill_switch, run.exit_duration_minutes, run.exit_interval, start_time)

    @property
    def exit_time(self) -> float | None:
        """When the card has the attempt leave, in seconds since the epoch; None where it does not
        say.
        """
        if self.exit_duration_minutes is None:
            return None
        return self.start_time + 60 * self.exit_duration_minutes


class StopDecision(Record):
    """Why the training stops now, and the line that says so in the log. `save`: whether to save
    first.

    `node`: the one at fault for it.
    """

    reason: str
    restart: bool
    line: str
    save: bool = True
    node: str = ""


class Stopped(Exception):
    """Raised on all ranks alike, where the training does not go on."""

    def __init__(self, decision: StopDecision) -> None:
        super().__init__(decision.line)
        self.decision = decision


class SignalFlag:
    """Remembers the first stop signal. The handler only sets a flag: the loop acts at its next safe
    point.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    def install(self) -> None:
        """Take over USR1, TERM and INT. Call it before slow imports: their default action ends the
        process.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number


KILL_SWITCH, SIGNAL, DURATION = range(3)


def look(
    limits: StopConditions,
    flag: SignalFlag,
    stop_request: Path,
    exit_time: float | None,
    now: float,
) -> tuple[int, int, int]:
    """What rank 0 sees: (kill switch, signal, duration), zero meaning no. Two file look-ups,
    nothing is opened.

    The second is the signal's number, so that the log can name it; a stop request counts as USR1.
    `exit_time`: when the attempt leaves by the clock, in seconds since the epoch; None: no clock
    ends it.
    """
    kill = int(os.path.lexists(limits.kill_switch))
    asked = flag.received or (signal.SIGUSR1 if os.path.lexists(stop_request) else 0)
    over = exit_time is not None and now > exit_time
    return kill, int(asked), int(over)


def decide(
    signals: Sequence[int], limits: StopConditions, iteration: int, trained: bool, now: float
) -> StopDecision | None:
    """The one decision that follows from what rank 0 saw; None: go on.

    `trained` says whether this attempt has done a step: the exit interval counts only then, or a
    resume at a multiple would leave at once. The strongest reason wins: a kill switch also keeps
    later tasks from training.
    """
    stamp = datetime.fromtimestamp(now).strftime("%Y-%m-%d %H:%M:%S")
    if signals[KILL_SWITCH]:
        return StopDecision(
            "kill-switch",
            False,
            f"[Detected kill switch at {limits.kill_switch}. Exiting] datetime: {stamp} ",
        )
    if signals[SIGNAL]:
        name = signal.Signals(signals[SIGNAL]).name
        return StopDecision(
            "signal",
            True,
            f"[exiting program on signal {name} at iteration {iteration}] datetime: {stamp} ",
        )
    if signals[DURATION]:
        minutes = (now - limits.start_time) / 60
        return StopDecision(
            "exit-duration", True, f"[exiting program after {minutes} minutes] datetime: {stamp} "
        )
    if trained and limits.exit_interval is not None and iteration % limits.exit_interval == 0:
        return StopDecision(
            "exit-interval", True, f"[exiting program at iteration {iteration}] datetime: {stamp} "
        )
    return None


def steady_clock() -> Callable[[], float]:
    """A clock in seconds since the epoch that starts at the time of day and from then on never
    jumps.
    """
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


class HeartbeatWriter:
    """Writes this rank's heartbeat: at once when the phase changes, else at most every
    HEARTBEAT_SECONDS.

    On rank 0 each change of phase is also kept, as a phase of `launch`.
    """

    def __init__(
        self,
        paths: RunPaths,
        rank: int,
        job_id: str,
        clock: Callable[[], float] = time.time,
        launch: int = 1,
    ):
        self._path = paths.heartbeat(rank)
        self._rank = rank
        self._job_id = job_id
        self._clock = clock
        self._host = host_name()
        self._phase = ""
        self._written = 0.0
        self._complained = False
        self._iteration = 0
        self._request = 0
        self._writing = threading.Lock()  # an end without saving is reported by another thread
        self._phases = PhaseWriter(paths.phases(job_id), launch, tell) if rank == 0 else None

    @property
    def iteration(self) -> int:
        """The iteration that was reported last."""
        return self._iteration

    def beat(self, phase: str, iteration: int, at_once: bool = False) -> None:
        """Report the phase; `at_once` also within a second of the last report.

        A file system that refuses it must not stop a training: it is said once on stderr.
        """
        now = self._clock()
        self._iteration = iteration
        # A clock that was set back must not silence the heartbeat until it has caught up.
        if not at_once and phase == self._phase and 0 <= now - self._written < HEARTBEAT_SECONDS:
            return
        self._phase = phase
        self._write(now)

    def acknowledge(self, request: int) -> None:
        """Report at once that this rank honours a request: its receipt. Nothing for one without a
        number.
        """
        if request and request != self._request:
            self._request = request
            self._write(self._clock())

    def end_now(self, request: int) -> None:
        """Report the end of this rank, from any thread."""
        self._phase, self._request = "ended", request or self._request
        self._write(self._clock())

    def _write(self, now: float) -> None:
        with self._writing:
            self._written = now
            beat = Heartbeat(
                self._rank,
                self._host,
                os.getpid(),
                phase=self._phase,
                iteration=self._iteration,
                time=now,
                job_id=self._job_id,
                request=self._request,
            )
            try:
                write_heartbeat(self._path, beat)
            except OSError as error:
                if not self._complained:
                    self._complained = True
                    tell(f"heartbeat cannot be written: {error}")
            if self._phases is not None:
                self._phases.enter(self._phase, self._iteration, now)


@dataclass
class Worker:
    """One rank of an attempt: what it is before anything of the training exists.

    `start_time`: of the monotonic clock, when this process began. `lease`: rank 0's, once it is
    begun.
    """

    config: TrainerConfig
    attempt: AttemptIdentity
    rank: int
    heartbeat: HeartbeatWriter
    flag: SignalFlag
    start_time: float = field(default_factory=time.monotonic)
    lease: Lease | None = None
    clock: Callable[[], float] = field(default_factory=steady_clock)

    @cached_property
    def paths(self) -> RunPaths:
        return self.config.paths

    @property
    def fence(self) -> Callable[[], None] | None:
        """Asked before anything is published or renamed: whether this trainer still holds the
        lease.
        """
        if self.lease is not None:
            return self.lease.check
        return None

    def say(self, line: str) -> None:
        """A line of the log, once for all ranks."""
        if self.rank == 0:
            tell(line)


def write_end_marker(
    paths: RunPaths,
    attempt: AttemptIdentity,
    decision: StopDecision,
    iteration: int,
    checkpoint_step: int | None,
) -> EndMarker:
    """Write the attempt's end marker (one rank only, after the last save). Raises OSError when it
    cannot be written.
    """
    marker = EndMarker(
        reason=decision.reason,
        iteration=iteration,
        checkpoint_step=checkpoint_step,
        restart=decision.restart,
        message=decision.line.strip(),
        time=time.time(),
        host=host_name(),
        job_id=attempt.job_id,
        launch=attempt.launch,
        node=decision.node,
    )
    write_json(paths.end_marker(attempt.job_id), document(marker))
    return marker


def write_failure(
    paths: RunPaths,
    attempt: AttemptIdentity,
    rank: int,
    error: BaseException,
    iteration: int,
    refusal: str = "",
) -> None:
    """Keep one rank's failure: `state/attempts/JOB/failures/rank-R.json`, the evidence for "who
    failed first".

    `refusal`: the end reason, where one line of this rank's own says all.
    """
    write_json(
        paths.attempt(attempt.job_id) / "failures" / f"rank-{rank}.json",
        {
            "rank": rank,
            "host": host_name(),
            "time": time.time(),
            "iteration": iteration,
            "launch": attempt.launch,
            "error": f"{type(error).__name__}: {error}",
            "refusal": refusal,
            "node": error.node_without_access if isinstance(error, NodeFilesError) else "",
            "traceback": "".join(traceback.format_exception(error)),
        },
    )


@contextmanager
def without_collections() -> Iterator[None]:
    """Load torch and DeepSpeed inside: nothing of what they make as they load is garbage.

    What is there at the end stays out of every later collection, each of which would walk it all.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def exit_process(code: int, close: Callable[[], None], patience_seconds: float = 20.0) -> NoReturn:
    """End this process for certain: try `close`, but whatever thread or library hangs, leave within
    the patience.

    The original sometimes stayed after its clean exit and held 384 GPUs; `os._exit` cannot.
    """
    timer = threading.Timer(patience_seconds, os._exit, args=(code,))
    timer.daemon = True
    timer.start()
    try:
        close()
    except (
        Exception
    ) as error:  # the work is saved and the verdict written: a failing clean-up changes neither
        tell(f"clean-up failed: {error}")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)

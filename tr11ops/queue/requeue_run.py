"""Runs a plain command in a job, asks it to stop before the job's time is over, and puts the job back
into the queue.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from tr11ops.base.errors import Refusal, SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import cause
from tr11ops.base.processes import exit_status
from tr11ops.base.stop_signals import obeying
from tr11ops.base.units import counted, duration
from tr11ops.cluster.base import Job, JobState
from tr11ops.queue.requeue import (
    JobStart,
    RequeueRequest,
    StartStore,
    StopCause,
    newest_change,
    why_not,
)
from trainer.contract.errors import NEEDS_PERSON, UNOBSERVED

LOOK_SECONDS = 120.0  # between two questions whether the limit was moved
LATE_SECONDS = 0.5  # a signal to the whole job reaches the command and us in any order
AGAIN_SECONDS = 5.0  # between two tries at a scheduler that is silent
LEAVE_SECONDS = 60.0  # for the scheduler to end what it has put back
_ENDED = 0  # among the numbers of signals: the command has ended
_REASONS = {
    signal.SIGUSR1: StopCause.WARNED,
    signal.SIGUSR2: StopCause.WARNED,
    signal.SIGTERM: StopCause.TERMINATED,
    signal.SIGINT: StopCause.INTERRUPTED,
}


class RequeueScheduler(Protocol):
    """What is asked of Slurm."""

    def job(self, job_id: str) -> Job | None:
        """As `Scheduler.job`."""

    def requeue(self, job_id: str, *, as_submitted: bool) -> None:
        """Put a running job back. Raises SchedulerError."""


class GuardedCommand:
    """One command in one start of a job. `limit`: when the job ends, in seconds since the epoch."""

    def __init__(
        self,
        request: RequeueRequest,
        *,
        start: JobStart,
        limit: float,
        store: StartStore,
        scheduler: RequeueScheduler,
        tell: Callable[[str], None],
    ) -> None:
        self._request = request
        self._start = start
        self._limit = limit
        self._store = store
        self._scheduler = scheduler
        self._tell = tell
        self._job: Job | None = None
        self._events: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes]

    def run(self) -> int:
        """Run it to its end, or to that of the job's time; returns the exit code of `tr11 requeue`.

        Raises Refusal where the command cannot be started, or another call has this start.
        """
        self._store.claim(self._start)
        before = newest_change(self._request.progress)
        with obeying(self._events.put, tuple(_REASONS)):
            self._begin()
            asked = self._until_asked()
            if asked is None:
                status = exit_status(self._process.wait())
                self._keep(status=status, progressed=self._progressed(before))
                return status
            asked_at = time.time()
            self._ask(asked)
            self._until_ended()
            code = self._process.poll()
            if code is not None:
                self._keep(status=exit_status(code))
            self._keep(asked=asked, progressed=self._progressed(before))
            return self._leave(asked_at)

    # ------------------------------------------------------------------------- until it ends
    def _begin(self) -> None:
        words = self._request.command
        try:
            self._process = subprocess.Popen(
                words, process_group=0 if self._request.to_group else None
            )
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            self._keep(status=code)
            raise Refusal(f"{words[0]}: {error.strerror}", code) from None
        threading.Thread(target=self._await_end, daemon=True).start()

    def _await_end(self) -> None:
        self._process.wait()
        self._events.put(_ENDED)

    def _next(self, until: float) -> int | None:
        """The next signal, or the command's end; None where nothing comes `until` then."""
        wait = max(0.0, min(until - time.time(), threading.TIMEOUT_MAX))
        with suppress(queue.Empty):
            return self._events.get(timeout=wait)
        return None

    def _until_asked(self) -> StopCause | None:
        """Why the command has to stop; None where it ended by itself."""
        while True:
            due = self._limit - self._request.before
            now = time.time()
            event = self._next(min(due, now + LOOK_SECONDS))
            if event == _ENDED:
                return self._asked_with_the_end()
            if event is not None:
                return _REASONS[signal.Signals(event)]
            self._look()
            if time.time() >= self._limit - self._request.before:
                return StopCause.LIMIT

    def _asked_with_the_end(self) -> StopCause | None:
        """A signal that ended the command sooner than it was heard here."""
        if self._process.wait() == 0:
            return None
        event = self._next(time.time() + LATE_SECONDS)
        if event is None:
            return None
        return _REASONS[signal.Signals(event)]

    def _look(self) -> bool:
        """See how the job is now: its limit may have been moved. False where Slurm is silent."""
        try:
            self._job = self._scheduler.job(self._start.job)
        except SchedulerError:
            return False
        job = self._job
        if job is not None and job.state is JobState.RUNNING:
            if job.time_limit_seconds is None:
                self._limit = math.inf
            else:
                self._limit = job.end_time or math.inf
        return True

    def _ask(self, asked: StopCause) -> None:
        """Ask the command to stop: in its own way where the job goes on later, else as we were."""
        name = self._request.signal
        if asked in {StopCause.TERMINATED, StopCause.INTERRUPTED}:
            is_seen = self._look()
            if not is_seen or self._job is None or self._job.state is not JobState.RUNNING:
                name = "TERM"
        left = duration(self._limit - time.time())
        self._tell(f"{asked.words}, the job ends in {left}: {name} to the command")
        self._send(signal.Signals[f"SIG{name}"])

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self._request.to_group:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def _until_ended(self) -> None:
        """Wait for the command, for as long as the job can still be put back in time."""
        while self._process.poll() is None:
            event = self._next(self._request.last_moment(self._limit))
            if event is None:
                self._tell("the command has not stopped; its job's time is over")
                return
            if event in {signal.SIGTERM, signal.SIGINT}:
                self._send(event)

    # ------------------------------------------------------------------------- what comes of it
    def _progressed(self, before: float | None) -> bool | None:
        after = newest_change(self._request.progress)
        if before is None or after is None:
            return None
        return after > before

    def _keep(self, **changes: object) -> None:
        self._start = replace(self._start, **changes)
        try:
            self._store.write(self._start)
        except OSError as error:
            self._tell(f"the record of this start could not be written: {cause(error)}")

    def _leave(self, asked_at: float) -> int:
        status = self._start.status
        finished = self._request.finished
        if finished is not None and finished.exists():
            self._tell(f"{finished} is there: nothing is left to do")
            return status or 0
        while not self._look():
            if time.time() >= self._limit:
                return self._stay_out("the scheduler does not answer", UNOBSERVED)
            time.sleep(AGAIN_SECONDS)
        past = self._store.past(self._start.number)
        why = why_not(self._job, self._start, past, self._request, asked_at)
        if why:
            return self._stay_out(why, status or NEEDS_PERSON)
        count = counted(1 + sum(one.requeued for one in past), "time")
        self._keep(requeued=True)  # before it is: then everything here is ended
        self._tell(f"back into the queue, {count} of at most {self._request.most}")
        return self._requeue()

    def _stay_out(self, why: str, code: int) -> int:
        self._keep(requeued=False, why=why)
        self._tell(f"job {self._start.job} is not put back into the queue: {why}")
        return code

    def _requeue(self) -> int:
        """Put the job back, and wait to be ended with it: what follows in the script shall not run."""
        while True:
            try:
                self._scheduler.requeue(self._start.job, as_submitted=True)
                break
            except SchedulerUnreachable as error:
                if time.time() >= self._limit:
                    return self._stay_out(str(error), UNOBSERVED)
                time.sleep(AGAIN_SECONDS)
                # the answer alone may have been lost
                if self._look() and (self._job is None or self._job.state is not JobState.RUNNING):
                    break
            except SchedulerError as error:
                return self._stay_out(str(error), NEEDS_PERSON)
        until = time.time() + LEAVE_SECONDS
        while self._next(until) not in {None, signal.SIGTERM}:
            pass
        return NEEDS_PERSON

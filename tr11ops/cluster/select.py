"""Which scheduler to use (`slurm`, `local`, or what this machine has), and asking it ahead of need
or once for several runs.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Literal, TypeVar

from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Job, Node, Overview, Scheduler, SchedulerClock

# Asks a scheduler before the answer is needed: its commands take their time, and so do our own
# imports.

T = TypeVar("T")

FRESH_SECONDS = 15.0


class AskedAhead:
    """An Overview whose jobs of one name and nodes are asked for at once, side by side, before
    anyone wants them.

    The first answers are those, if they are wanted soon; else the scheduler is asked again. Errors
    are raised where the answer is taken.
    """

    def __init__(self, scheduler: Overview, name: str) -> None:
        self.name = scheduler.name
        self._scheduler = scheduler
        self._asked_name = name
        self._jobs: _Answer[tuple[Job, ...]] | None = _Answer(lambda: scheduler.jobs(name=name))
        self._nodes: _Answer[tuple[Node, ...]] | None = _Answer(scheduler.nodes)

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        """As a Scheduler's."""
        answer, self._jobs = self._jobs, None
        if answer is None or answer.is_stale or name != self._asked_name:
            return self._scheduler.jobs(name=name)
        return answer.take()

    def nodes(self) -> tuple[Node, ...]:
        """As a Scheduler's."""
        answer, self._nodes = self._nodes, None
        if answer is None or answer.is_stale:
            return self._scheduler.nodes()
        return answer.take()

    def job(self, job_id: str) -> Job | None:
        """As a Scheduler's. Raises SchedulerError."""
        return self._scheduler.job(job_id)

    def clock(self) -> float:
        """As a Scheduler's, where it has one. Raises SchedulerError."""
        if not isinstance(self._scheduler, SchedulerClock):
            raise SchedulerError("this scheduler does not tell its time")
        return self._scheduler.clock()


class _Answer(Generic[T]):
    """What a call returns or raises, made in a thread of its own."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._results: list[T] = []
        self._error: Exception | None = None
        self._came: float | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self._results.append(self._call())
        except Exception as error:  # it belongs to the one who takes the answer
            self._error = error
        self._came = time.monotonic()

    @property
    def is_stale(self) -> bool:
        """Whether the answer came so long ago that it is worth nothing any more."""
        return self._came is not None and time.monotonic() - self._came > FRESH_SECONDS

    def take(self) -> T:
        """Wait for it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]


SchedulerKind = Literal["slurm", "local", "auto"]

USUAL_CONFIGURATIONS = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/usr/local/etc/slurm.conf",
)


def has_slurm() -> bool:
    """Is Slurm installed and configured here? Inside a job of the embedded scheduler the answer is
    no.
    """
    if os.environ.get("TR11_SCHEDULER") == "local" or shutil.which("sbatch") is None:
        return False
    named = os.environ.get("SLURM_CONF")
    if named:
        return Path(named).is_file()
    return any(Path(path).is_file() for path in USUAL_CONFIGURATIONS)


def start_of_watchdog() -> str:
    """The words of tr11 that have a watchdog look from here: where nothing starts it by itself, in
    a terminal.
    """
    if shutil.which("crontab") is not None or has_slurm():
        return "cron install"
    return "cron run"


def choose_scheduler(kind: SchedulerKind) -> Scheduler:
    """The scheduler of that kind; `auto` is Slurm where it is configured, else the embedded one.

    Raises ValueError for another kind.
    """
    if kind not in {"slurm", "local", "auto"}:
        raise ValueError(f"scheduler {kind!r}: use slurm, local or auto")
    if kind == "slurm" or (kind == "auto" and has_slurm()):
        from tr11ops.cluster.slurm import SlurmScheduler

        return SlurmScheduler()
    from tr11ops.cluster.local import LocalScheduler

    return LocalScheduler()


# One look at several runs: a scheduler's answers serve all of them.


class SharedOverview:
    """An Overview for one look at many runs: each question is asked once, and not again where it
    failed.
    """

    def __init__(self, scheduler: Overview) -> None:
        self.name = scheduler.name
        self._scheduler = scheduler
        self._jobs: dict[str | None, tuple[Job, ...]] = {}
        self._nodes: tuple[Node, ...] | None = None
        self._error: SchedulerError | None = None

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        """As a Scheduler's."""
        if name not in self._jobs:
            self._jobs[name] = self._asked(lambda: self._scheduler.jobs(name=name))
        return self._jobs[name]

    def nodes(self) -> tuple[Node, ...]:
        """As a Scheduler's."""
        if self._nodes is None:
            self._nodes = self._asked(self._scheduler.nodes)
        return self._nodes

    def job(self, job_id: str) -> Job | None:
        """As a Scheduler's, asked each time. Raises SchedulerError."""
        return self._scheduler.job(job_id)

    def _asked(self, call: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
        if self._error is not None:
            raise self._error
        try:
            return call()
        except SchedulerError as error:
            self._error = error
            raise

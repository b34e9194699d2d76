"""Which scheduler a run is looked for on, and how it is opened for a look."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from tr11ops.base.errors import SchedulerError, WrongUsage
from tr11ops.base.observed import Unknown

if TYPE_CHECKING:
    from tr11ops.cluster.base import Overview, Scheduler
    from tr11ops.rundir.paths import RunDirectory

CLUSTERS = ("slurm", "local", "auto")  # what --scheduler takes


def check_scheduler_word(kind: str) -> str:
    """The word as it is. Raises WrongUsage for one that `--scheduler` does not take."""
    if kind not in CLUSTERS:
        raise WrongUsage(f"--scheduler {kind!r}: must be one of {', '.join(CLUSTERS)}")
    return kind


def open_scheduler(kind: str) -> Scheduler:
    """The scheduler that `--scheduler` names. Raises WrongUsage for an unknown word."""
    from tr11ops.cluster.select import choose_scheduler

    return choose_scheduler(check_scheduler_word(kind))  # type: ignore[arg-type]


def looking(scheduler: Scheduler) -> Scheduler:
    """The same scheduler for a look, or for a stop: it gives up soon."""
    if scheduler.name != "slurm":
        return scheduler
    from tr11ops.base.deadline import SCHEDULER_SECONDS
    from tr11ops.cluster.slurm import SlurmScheduler

    return SlurmScheduler(timeout_seconds=SCHEDULER_SECONDS)


def kind_to_watch(directory: RunDirectory, kind: str) -> str:
    """Where a run is looked for: where it was submitted to, unless `--scheduler` names another."""
    recorded = None
    if kind == "auto":
        recorded = directory.recorded_scheduler()
    if recorded in CLUSTERS:
        return recorded
    return kind


def open_reader(directory: RunDirectory, kind: str) -> Scheduler | Unknown:
    """The scheduler that a run is looked for on; why there is none, where looking goes on without
    it.
    """
    return open_if_there(kind_to_watch(directory, kind))


def open_if_there(kind: str) -> Scheduler | Unknown:
    """The scheduler that `--scheduler` names, or why it is not here. Raises WrongUsage for an
    unknown word.
    """
    try:
        return open_scheduler(kind)
    except (SchedulerError, OSError) as error:
        return Unknown(f"no {kind} scheduler here: {error}")


class SharedReaders:
    """For looks at many runs: a scheduler's answers serve all runs that are looked at within
    `seconds`. `kind`: what `--scheduler` says.
    """

    def __init__(self, kind: str, seconds: float = math.inf) -> None:
        self._kind, self._seconds = kind, seconds
        self._made: dict[str, tuple[float, Overview | Unknown]] = {}

    def of(self, directory: RunDirectory) -> Overview | Unknown:
        """The reader for a run; why there is none. Raises WrongUsage for an unknown word."""
        from tr11ops.cluster.select import SharedOverview

        kind = kind_to_watch(directory, self._kind)
        made, reader = self._made.get(kind, (-math.inf, None))
        if reader is None or time.monotonic() - made > self._seconds:
            found = open_if_there(kind)
            if isinstance(found, Unknown):
                reader = found
            else:
                reader = SharedOverview(looking(found))
            self._made[kind] = (time.monotonic(), reader)
        return reader

    def forget(self) -> None:
        """Ask the schedulers again from now on: something was changed."""
        self._made.clear()

"""The run's work that waits at the scheduler, changed in place by the task that runs.

A scheduler that does not answer is asked again for as long as that may help; the task ends in any case, and the next
one reads the run's own list and the last verdict before it trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tr11ops.cluster.base import Job, JobState, Scheduler, SchedulerError, SchedulerUnreachable
from tr11ops.cluster.hostlist import compress
from tr11ops.nodes.given import given_to_scheduler, known_names
from tr11ops.ownership import Ownership
from tr11ops.rundir import RunDirectory

T = TypeVar("T")

PATIENCE_SECONDS = 600.0  # how long a task stays for a scheduler that does not answer
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 20.0


class Ordering(Protocol):
    """A scheduler that can make waiting work wait for a job."""

    def run_after(self, job_id: str, after: str) -> None:
        """Let pending work start only after the end of job `after`, however that ends."""


@dataclass(frozen=True)
class Waiting:
    """One array, or single job, that waits, as one or more of the scheduler's records."""

    number: str
    jobs: tuple[Job, ...]

    @property
    def excluded(self) -> frozenset[str]:
        return frozenset(node for job in self.jobs for node in job.excluded)


@dataclass(frozen=True)
class Changes:
    """What came of a change: the jobs where it is so now, those of them that it was not so of before, and is it all?"""

    numbers: tuple[str, ...]
    changed: tuple[str, ...]
    complete: bool


class WaitingWork:
    """The jobs of this run that wait at the scheduler: an array's tasks, and whatever else was submitted.

    `give_up` is asked between two tries. `say` gets a line for what was done and what was not.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        directory: RunDirectory,
        array_id: str | None,
        say: Callable[[str], None],
        give_up: Callable[[], bool] = lambda: False,
        pause: Callable[[float], None] = time.sleep,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._scheduler = scheduler
        self._ownership = Ownership(directory, array_id=array_id)
        self._array_id = array_id
        self._say = say
        self._give_up = give_up
        self._pause = pause
        self._patience_seconds = patience_seconds

    def exclude(self, nodes: Iterable[str]) -> bool:
        """Add nodes to the exclude lists of the waiting work, in place; False when that could not be done.

        What the scheduler does not know (any more) is left out, and told.
        """
        known = known_names(self._scheduler)
        given = given_to_scheduler(sorted(nodes), known)
        if given.left_out:
            gone = f"{compress(given.left_out)}: unknown to the scheduler, left out of what it is given"
            self._say(f"tr11: {gone}; on the run's list it stays")
        wanted = frozenset(given.nodes)
        if not wanted:
            return True
        done = self._change(
            "exclude nodes from",
            lambda work: self._scheduler.exclude(
                work.number, given_to_scheduler(sorted(work.excluded | wanted), known).nodes
            ),
            lambda job: wanted <= set(job.excluded),
        )
        for number in done.numbers:
            self._say(f"tr11: the waiting tasks of job {number} will not use {compress(wanted)}")
        return done.complete

    def readmit(self, nodes: Iterable[str]) -> bool:
        """Take nodes off the exclude lists of the waiting work, in place; False when that could not be done."""
        wanted, known = frozenset(nodes), known_names(self._scheduler)
        done = self._change(
            "take nodes off the exclude lists of",
            lambda work: self._scheduler.exclude(
                work.number, given_to_scheduler(sorted(work.excluded - wanted), known).nodes
            ),
            lambda job: not wanted & set(job.excluded),
        )
        for number in done.numbers:
            self._say(f"tr11: the waiting tasks of job {number} may use {compress(wanted)} again")
        return done.complete

    def hold(self) -> Changes:
        """Hold all of it; what was held before is among the numbers, and not among those that were changed."""
        held = self._change(
            "hold", lambda work: self._scheduler.hold(work.number), lambda job: job.reason.startswith("JobHeld")
        )
        for number in held.changed:
            self._say(f"tr11: the waiting tasks of job {number} are held")
        return held

    def release(self, numbers: Iterable[str]) -> None:
        """Let jobs start again that `hold` has held."""
        wanted = set(numbers)
        released = self._change(
            "release",
            lambda work: self._scheduler.release(work.number),
            lambda job: not job.reason.startswith("JobHeld"),
            lambda number: number in wanted,
        )
        for number in released.changed:
            self._say(f"tr11: the waiting tasks of job {number} are released")

    def run_after(self, ordering: Ordering, job_id: str) -> bool:
        """Keep the array's other tasks from starting before job `job_id` has ended; False when it could not be done.

        An array's limit of one task at a time is not enough: once a job has lost a node and lives on, Slurm (22.05)
        counts it as ended and starts the next one beside it.
        """
        done = self._change(
            "queue behind this job",
            lambda work: ordering.run_after(work.number, job_id),
            lambda job: job_id in job.dependency,
            lambda number: number == self._array_id,
        )
        return done.complete

    def _change(
        self,
        what: str,
        change: Callable[[Waiting], None],
        is_so: Callable[[Job], bool],
        which: Callable[[str], bool] = lambda number: True,
    ) -> Changes:
        """Make it so for all that waits.

        An answer is not believed where the job shows otherwise: Slurm may refuse for one task what it did for others.
        """
        try:
            waiting = [work for work in self._persist(self._look) if which(work.number)]
        except SchedulerError as error:
            self._say(f"tr11: cannot {what} the waiting tasks, the scheduler does not say what waits: {error}")
            return Changes((), (), False)
        numbers: list[str] = []
        changed: list[str] = []
        complete = True
        for work in waiting:
            if all(map(is_so, work.jobs)):
                numbers.append(work.number)
                continue
            try:
                self._persist(lambda work=work: change(work))  # type: ignore[misc]
            except SchedulerError as error:
                now = self._again(work.number)
                if now is None or not all(map(is_so, now.jobs)):
                    if now is not None:
                        complete = False
                        self._say(f"tr11: cannot {what} the waiting tasks of job {work.number}: {error}")
                    continue
            numbers.append(work.number)
            changed.append(work.number)
        return Changes(tuple(numbers), tuple(changed), complete)

    def _look(self) -> tuple[Waiting, ...]:
        """What of this run waits now."""
        found: dict[str, list[Job]] = {}
        for job in self._scheduler.jobs():
            if job.state is JobState.PENDING and self._ownership.has(job):
                found.setdefault(job.array_id or job.raw_id, []).append(job)
        return tuple(Waiting(number, tuple(jobs)) for number, jobs in found.items())

    def _again(self, number: str) -> Waiting | None:
        """That work as it is now; None when it waits no more. Where the scheduler does not say, as one to be missed."""
        try:
            return next((work for work in self._look() if work.number == number), None)
        except SchedulerError:
            return Waiting(number, (Job(number, number, None, None, "", "", JobState.UNKNOWN),))

    def _persist(self, action: Callable[[], T]) -> T:
        """Do it, again and again while the scheduler is silent. Raises SchedulerError when it refuses or stays so."""
        deadline = time.monotonic() + self._patience_seconds
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return action()
            except SchedulerUnreachable as error:
                if self._give_up() or time.monotonic() + pause > deadline:
                    raise
                self._say(f"tr11: the scheduler does not answer ({error}): asking again")
            self._pause(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

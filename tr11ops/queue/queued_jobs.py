"""The run's queued jobs, changed in place by the task that runs.

A scheduler that does not answer is asked again for as long as that may help; the task ends in any
case, and the next one reads the run's own list and the last verdict before it trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.base.now import now
from tr11ops.base.retry import RetryPolicy, retry
from tr11ops.cluster.arrays import array_number, covered, covers, is_cell, names_of
from tr11ops.cluster.base import Job, JobScheduler, JobState, Scheduler
from tr11ops.cluster.pending_reasons import is_held
from tr11ops.observe.jobs import read_own_jobs
from tr11ops.queue.held_jobs import not_held, shows
from tr11ops.rundir.hold_store import with_mark
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.record import Record

T = TypeVar("T")

PATIENCE_SECONDS = 600.0  # how long a task stays for a scheduler that does not answer
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 20.0


class PendingChanges(Record):
    """What came of a change: the names of where it is so now, of where it was not so before, and is
    it all?
    """

    numbers: tuple[str, ...]
    changed: tuple[str, ...]
    complete: bool


class PendingJobs:
    """The jobs of this run that wait at the scheduler: an array's tasks, and whatever else was
    submitted.

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
        self.scheduler = scheduler
        self._directory = directory
        self._array_id = array_id
        self._say = say
        self._give_up = give_up
        self._policy = RetryPolicy(
            seconds=patience_seconds,
            first_seconds=FIRST_PAUSE_SECONDS,
            longest_seconds=LONGEST_PAUSE_SECONDS,
            jitter=(1.0, 1.0),
            says_all=True,
            sleep=pause,
            say=lambda line: say(f"tr11: the scheduler does not answer: {line}"),
        )

    def hold(self) -> PendingChanges:
        """Hold all of it; what was held before is among the numbers, and not among those that were
        changed.

        Of an array of which a part is held already, the other tasks alone are held, and named.
        """
        held = self._change("hold", self.scheduler.hold, is_held, _to_hold)
        for name in held.changed:
            self._say(f"tr11: the waiting tasks of job {name} are held")
        return held

    def release(self, numbers: Iterable[str]) -> PendingChanges:
        """Let jobs start again that `hold` has held. Those that wait no more are not among the
        numbers.
        """
        wanted = tuple(numbers)
        released = self._change(
            "release", self.scheduler.release, lambda job: not is_held(job), lambda _: wanted
        )
        for name in released.changed:
            self._say(f"tr11: the waiting tasks of job {name} are released")
        return released

    def mark_held(self, names: Iterable[str], why: str, is_for_fault: bool) -> None:
        """Have held jobs say in their comments that tr11 holds them, and why: for where no record
        can be written.

        Raises SchedulerError when that cannot be done, and for what has no comment of its own.
        """
        wanted = tuple(names)
        for job in self.retry(self.look):
            if is_held(job) and any(covers(name, job) for name in wanted):
                self.retry(lambda job=job: mark_held(self.scheduler, job, why, is_for_fault))  # type: ignore[misc]

    def run_after(self, ordering: JobScheduler, job_id: str) -> bool:
        """Keep the array's other tasks from starting before job `job_id` has ended; False when it
        could not be done.

        An array's limit of one task at a time is not enough: once a job has lost a node and lives
        on, Slurm (22.05) counts it as ended and starts the next one beside it.
        """
        array = (self._array_id,) if self._array_id is not None else ()
        done = self._change(
            "queue behind this job",
            lambda name: ordering.run_after(name, job_id),
            lambda job: job_id in job.dependency,
            lambda _: array,
        )
        return done.complete

    def _change(
        self,
        what: str,
        change: Callable[[str], None],
        is_so: Callable[[Job], bool],
        names_in: Callable[[tuple[Job, ...]], tuple[str, ...]],
    ) -> PendingChanges:
        """Make it so for all that waits under these names; they are those of jobs, arrays and tasks
        of one.
        """
        try:
            queued = self.retry(self.look)
        except SchedulerError as error:
            self._say(
                f"tr11: cannot {what} the waiting tasks, the scheduler does not list the queued jobs: {error}"
            )
            return PendingChanges((), (), False)
        numbers: list[str] = []
        changed: list[str] = []
        complete = True
        for name in names_in(queued):
            waiting = covered(name, queued)
            if not waiting:
                continue
            if all(map(is_so, waiting)):
                numbers.append(name)
                continue
            try:
                self.retry(lambda name=name: change(name))  # type: ignore[misc]
            except SchedulerError as error:
                came_about = shows(self.look, name, is_so)
                if came_about is False:
                    complete = False
                    self._say(f"tr11: cannot {what} the waiting tasks of job {name}: {error}")
                if not came_about:
                    continue
            numbers.append(name)
            changed.append(name)
        return PendingChanges(tuple(numbers), tuple(changed), complete)

    def look(self) -> tuple[Job, ...]:
        """The run's queued jobs as they are now. What may be another's is left as it is, and said."""
        found = read_own_jobs(self._directory, self.scheduler, self._array_id)
        if found.why_unclear:
            self._say(f"tr11: {found.why_unclear}; it is left as it is")
        return tuple(job for job in found.jobs if job.state is JobState.PENDING)

    def retry(self, action: Callable[[], T]) -> T:
        """Do it, again and again while the scheduler is silent. Raises SchedulerError when it
        refuses or stays so, and at once where this machine has no command to ask it with.
        """

        def once() -> T:
            try:
                return action()
            except SchedulerUnreachable as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    raise SchedulerError(str(error)) from None
                raise

        return retry(once, self._policy, SchedulerUnreachable, must_end=self._give_up)


def mark_held(scheduler: Scheduler, job: Job, why: str, is_for_fault: bool) -> None:
    """Have a held job say in its comment that tr11 holds it, and why. Raises SchedulerError as
    `PendingJobs` does.
    """
    if is_cell(job.comment):
        raise SchedulerError(f"job {job.job_id} shares its comment with other runs")
    [name] = names_of([job], [job])
    scheduler.set_comment(name, with_mark(job.comment, why, is_for_fault, now()))


def _to_hold(queued: tuple[Job, ...]) -> tuple[str, ...]:
    """What is not held yet, without the part of its array that is; and each array that is held as a
    whole.
    """
    free = {array_number(job) for job in queued if not is_held(job)}
    whole = dict.fromkeys(number for job in queued if (number := array_number(job)) not in free)
    return (*not_held(queued), *whole)

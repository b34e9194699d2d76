"""The periodic jobs in the foreground, until a signal ends it: APScheduler gives the threads and
the waiting.

What was run when is in the records of the jobs, not in the daemon: a new one goes on where the last
one was killed, and two of them start each round once.

What watches the run looks early where an attempt has ended since its last round: people hear of it
within seconds, not at the next point of the schedule.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger

from tr11ops.base.observed import cause
from tr11ops.base.stop_signals import StopEvent
from tr11ops.cron.jobs import PeriodicJob, Schedule, next_due, slack
from tr11ops.cron.runner import CronContext, last_round, last_starts, run_job, wait_for_rounds
from tr11ops.rundir.attempts import attempts_before

TICK_SECONDS = 5.0
JUMP_SECONDS = 5.0  # more than a clock is ever slewed within a tick
AGAIN_SECONDS = 60.0  # after a record that could not be read
EARLY_SECONDS = 60.0  # between two rounds of what watches, however often attempts end
LEAVING_SECONDS = 5.0  # for the job of an attempt that has said how it ended


class RecordTrigger(BaseTrigger):  # type: ignore[misc]
    """Fires when a job's own record says that it is due, then at each point of its schedule. Missed
    points are one.
    """

    def __init__(self, schedule: Schedule, started: Callable[[], float | None]):
        self._schedule = schedule
        self._started = started

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        """As APScheduler asks it; without a previous time the record is looked at."""
        moment = now.timestamp()
        if previous_fire_time is not None:
            latest = max(previous_fire_time.timestamp(), moment)
            return datetime.fromtimestamp(self._schedule.after(latest + slack(self._schedule)), UTC)
        try:
            due = next_due(self._schedule, self._started(), moment)
        except OSError:
            due = moment + AGAIN_SECONDS
        return datetime.fromtimestamp(max(due, moment), UTC)


class Daemon:
    """The jobs of one run, each in a thread of its own when it is due. `reload` gives others when
    the card changed.
    """

    def __init__(
        self,
        context: CronContext,
        jobs: tuple[PeriodicJob, ...],
        say: Callable[[str], None],
        reload: Callable[[], tuple[PeriodicJob, ...] | None] = lambda: None,
    ):
        self._context = context
        self._jobs = jobs
        self._say = say
        self._reload = reload
        self._stop = StopEvent()
        pool = {"default": ThreadPoolExecutor(max(8, 2 * len(jobs)))}
        defaults = {"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        self._scheduler = BackgroundScheduler(timezone=UTC, executors=pool, job_defaults=defaults)
        self._scheduler.add_listener(self._hear, EVENT_JOB_ERROR | EVENT_JOB_MAX_INSTANCES)

    def stop(self) -> None:
        """Start nothing more, and end after what runs. Called again: end what runs, too."""
        if self._stop.is_set():
            self._context.must_end.set()
        self._stop.set()

    def run(self) -> None:
        """Run until `stop`. Returns when nothing runs any more."""
        offset = time.time() - time.monotonic()
        self._schedule_all()
        self._scheduler.start()
        try:
            while not self._stop.wait(TICK_SECONDS):
                now = time.time() - time.monotonic()
                changed = self._changed_jobs()
                if changed is not None or abs(now - offset) > JUMP_SECONDS:
                    # the scheduler waits for times of the old clock, which may be hours away
                    self._jobs = self._jobs if changed is None else changed
                    self._say(
                        "the card has changed" if changed is not None else "the clock was set"
                    )
                    self._schedule_all()
                offset = now
                for job in self._jobs:
                    if job.watches:
                        self._look_early(job)
        finally:
            ending = threading.Thread(target=self._scheduler.shutdown, daemon=True)
            ending.start()
            wait_for_rounds([ending], self._context.must_end)

    def _changed_jobs(self) -> tuple[PeriodicJob, ...] | None:
        try:
            return self._reload()
        except (OSError, ValueError) as error:
            self._say(f"the card cannot be used, the jobs go on as before: {cause(error)}")
            return None

    def _schedule_all(self) -> None:
        self._scheduler.remove_all_jobs()
        for job in self._jobs:
            trigger = RecordTrigger(job.schedule, lambda job=job: self._started(job))  # type: ignore[misc]
            self._scheduler.add_job(self._round, trigger, args=[job], id=job.name)

    def _started(self, job: PeriodicJob) -> float | None:
        return last_starts(self._context.directory, (job,)).get(job.name)

    def _look_early(self, job: PeriodicJob) -> None:
        """Have a round begin where an attempt has just ended, once its job has had time to leave the
        queue, and again a minute later for one that took longer.
        """
        try:
            last = last_round(self._context, job.name)
            _, ended = next(attempts_before(self._context.directory.paths, None), (None, None))
        except OSError:
            return  # the round that is due says so
        now = self._context.clock()
        if last is None or last.is_running or ended is None or now < ended.time + LEAVING_SECONDS:
            return
        if now - last.started >= EARLY_SECONDS > last.started - ended.time:
            self._scheduler.add_job(self._round, args=[job, True], id="early look")

    def _round(self, job: PeriodicJob, is_early: bool = False) -> None:
        if not self._stop.is_set():
            done = run_job(self._context, job, forced=is_early)
            if done.result != "not due":
                self._say(done.line)

    def _hear(self, event: Any) -> None:
        if event.code == EVENT_JOB_MAX_INSTANCES:
            self._say(f"{event.job_id}: still running, its next round waits for the next point")
        else:
            self._say(f"{event.job_id}: an error of tr11 itself: {event.exception!r}")

"""What the scheduler says of an attempt's own job as it is now: whether it lives, until when, on
which nodes.

It is asked again and again beside the launches, so that a limit that someone changes is followed,
and a node that leaves the allocation is noticed, also one that trains nothing. No answer changes
nothing: the last one counts.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Job

LOOK_SECONDS = 30.0  # one small call: who shortens a limit to a minute must be heard in time
# from so long before the trainer leaves on, a longer limit may come at any moment
NEAR_SECONDS = 120.0
NEAR_LOOK_SECONDS = 10.0


class JobSource(Protocol):
    """A scheduler that tells of one job."""

    def job(self, job_id: str) -> Job | None: ...


def seconds_to_next_look(leaves: float | None, now: float) -> float:
    """How long to wait before the scheduler is asked again. `leaves`: when the trainer does, None:
    never.
    """
    if leaves is not None and 0 <= leaves - now < NEAR_SECONDS:
        return NEAR_LOOK_SECONDS
    return LOOK_SECONDS


class JobWatch:
    """Asks for one job. `leaves` is set by who follows it: when the trainer leaves, in seconds
    since the epoch.
    """

    def __init__(self, scheduler: JobSource, job_id: str) -> None:
        self._scheduler = scheduler
        self._job_id = job_id
        self._over = threading.Event()
        self.job: Job | None = None  # as it was last told, None before the first answer
        self.leaves: float | None = None

    def look(self) -> Job | None:
        """Ask now, and keep the answer; None where there is none at this moment."""
        try:
            found = self._scheduler.job(self._job_id)
        except SchedulerError:
            return None
        # a job that the scheduler does not know any more has not become another one
        if found is not None:
            self.job = found
        return found

    def start(self) -> None:
        """Ask regularly from now on, in a thread of its own: an answer may take long, and no launch
        waits for it.
        """
        threading.Thread(target=self._follow, name="job-watch", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _follow(self) -> None:
        while not self._over.wait(seconds_to_next_look(self.leaves, time.time())):
            self.look()

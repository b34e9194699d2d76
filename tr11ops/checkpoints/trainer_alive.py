"""Whether a trainer of the run is alive: by the scheduler's jobs, this machine's processes, and the
run's lease.
"""

from __future__ import annotations

import time

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Unknown, observed
from tr11ops.cluster.base import Scheduler
from tr11ops.cluster.process_marks import start_mark
from tr11ops.observe.foreground import foreground_trainings
from tr11ops.observe.lease import ROLLBACK, LeaseHolder, read_holder
from tr11ops.queue.stop import StopView
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import host_name
from trainer.contract.lease import clocks_of
from trainer.contract.record import Record


class Living(Record):
    """`words`: the trainers that live; `unknown`: what could not be seen, where none was. `ended`:
    the job of a claim that is young, but whose trainer is known to be over; "" for none.
    """

    words: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    ended: str = ""


def look_for_trainer(directory: RunDirectory, view: StopView, scheduler: Scheduler) -> Living:
    """Look at all three. `view` is what was seen of the jobs a moment ago."""
    holder = observed(
        lambda: read_holder(directory.paths, *clocks_of(directory.paths, time.time()))
    )
    here = observed(lambda: foreground_trainings(directory))
    words = [f"job {job.job_id} of {job.user} is {str(job.state).lower()}" for job in view.running]
    words += () if isinstance(here, Unknown) else here
    ended = ""
    if not words and isinstance(holder, LeaseHolder):
        if _is_over(holder, here, scheduler):
            ended = holder.job_id
        else:
            what = "a roll-back" if holder.job_id == ROLLBACK else "a trainer"
            words.append(f"{what} holds the run's lease: {holder.text}")
    if words:
        return Living(tuple(words))
    if view.read_error:
        unknown = [f"the scheduler does not answer: {view.read_error}"]
    else:
        unknown = []
    unknown += [view.unclear] if view.unclear else []
    unknown += [
        f"{what}: {found.why}"
        for what, found in (("the lease", holder), ("processes here", here))
        if isinstance(found, Unknown)
    ]
    return Living((), tuple(unknown), ended)


def _is_over(holder: LeaseHolder, here: tuple[str, ...] | Unknown, scheduler: Scheduler) -> bool:
    """Whether a claim's holder was killed a moment ago: its job is final, or it was a process here
    that is gone.
    """
    if holder.job_id == ROLLBACK:  # on another machine, it is waited for until its claim is old
        return holder.host == host_name() and start_mark(holder.process) is None
    if holder.is_of(host_name()):
        return here == ()
    try:
        job = scheduler.job(holder.job_id)
    except SchedulerError:
        return False
    return job is not None and job.state.is_final

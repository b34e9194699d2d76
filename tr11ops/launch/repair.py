"""Carrying out a change of the run's queue that a person has agreed to: launch first, then cancel
and release.

`queue/repair.py` plans it. What is cancelled comes again: those attempts are launched before the
old ones go.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.launch.session import LaunchJob, LaunchView, carry_out_locked
from tr11ops.launch.submit import launch_lock
from tr11ops.queue.held_jobs import release
from tr11ops.queue.repair import Repair, RepairStep
from tr11ops.runcard.card import parse_attempts
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import Submission
from trainer.contract.record import Record


class RepairOutcome(Record):
    """What came of a change: the new jobs, and what could not be done, in words (empty: all was
    done).
    """

    submitted: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def relaunch_of(job: LaunchJob, change: Repair) -> LaunchJob | None:
    """The launch that puts new attempts in the place of the cancelled ones; None where there is
    nothing to launch.
    """
    if not change.resubmit:
        return None
    request = replace(job.request, after=change.after, replaces=change.cancelled)
    return replace(job, array=job.array or parse_attempts(f"1-{change.resubmit}"), request=request)


def carry_out(
    job: LaunchJob,
    change: Repair,
    view: LaunchView | None,
    plan_again: Callable[[], Repair],
    why: str,
) -> RepairOutcome:
    """Launch what is to be launched, then do the steps, all under the launch lock and in the
    journal.

    `view` is the launch that was shown. Nothing is done where the queue is not as it was planned
    for any more (`plan_again`), nor where the launch is refused. What is cancelled has its
    successor in the queue by then, which waits for it. Raises LaunchBusy, SchedulerError and
    OSError as a launch does.
    """
    journal = Journal(job.directory.journal)
    records: tuple[Submission, ...] = ()
    with launch_lock(job.directory.launch_lock):
        if not plan_again().is_as(change):
            return RepairOutcome(
                failed=("the queue has changed meanwhile, and nothing was done: look again",)
            )
        again = relaunch_of(job, change)
        if again is not None and view is not None:
            checked, records = carry_out_locked(again, view, why or change.kind)
            if not records:
                return RepairOutcome(failed=tuple(str(check) for check in checked.faults))
        submitted = tuple(str(record.job_id) for record in records)
        failed = []
        for step in change.steps:
            data = {
                "action": step.action,
                "job_id": step.job,
                "why": step.why,
                "submitted": list(submitted),
            }
            refused = _carry_out_step(step, job)
            if refused:
                failed.append(f"{step.action} {step.job}: {refused}")
            else:
                journal.write(change.kind, why or step.why, data, job.user)
    return RepairOutcome(submitted, tuple(failed))


def _carry_out_step(step: RepairStep, job: LaunchJob) -> str:
    """Why it could not be done; "" when it is."""
    if step.action == "release":
        return "; ".join(
            why for _, why in release(job.directory, [step.job], job.scheduler).refused
        )
    try:
        job.scheduler.cancel(step.job)
    except SchedulerError as error:
        return str(error)
    return ""

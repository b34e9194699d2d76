"""Queued work that waits for a person: someone, or the scheduler, holds it, or why it waits is not
known.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tr11ops.base.observed import known
from tr11ops.cluster.arrays import array_number, covers, names_of
from tr11ops.cluster.pending_reasons import Cause, reason_of_job
from tr11ops.detect.finding import HELD_FOR_FAULT, Finding, Severity
from tr11ops.detect.unfinished_end import is_bad, passes_over_the_data
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.queue.held_jobs import held_jobs, record_of
from tr11ops.rundir.hold_store import HoldRecord

BOUND = "the scheduler's reason"
SEVERITIES = (
    "INFO where tr11 holds it for a kill switch or a pause, while its attempt leaves, or where all is trained, else "
    "WARNING (also for the tasks of an array that a person holds beside that); CRITICAL when nothing else can run"
)
LEAVING_SECONDS = 300.0  # of an attempt whose last act was to hold what is queued
NAME = "held"
NEEDS = ("jobs", "kill_switch", "pause")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """CRITICAL when nothing else of the run can run, else a warning that the chain stops after the
    present task.

    One finding for each array, and another for the part of it that tr11 did not hold. What tr11 holds, by its own
    record, is released by `tr11 resume`, or comes again with a mended card where the trainer refused the last attempt's
    (`tr11 launch --replace`); while a kill switch or a pause is in force, someone wants it so: INFO.
    Where the training is finished nothing is left for it to do: INFO too.
    """
    if snapshot.unmounted:  # whose hold it is stands there
        return
    stop = derived.stop_of(snapshot)
    idle, finished = derived.is_idle(snapshot), derived.is_finished(snapshot)
    waiting = [(job, reason_of_job(job).cause) for job in snapshot.pending_jobs]
    for number, job in {
        array_number(job): job for job, cause in waiting if cause is Cause.UNKNOWN
    }.items():
        yield Finding(
            NAME,
            Severity.CRITICAL if idle else Severity.WARNING,
            f"job {job.job_id} waits for a reason that tr11 does not know: {job.reason}",
            subject=number,
            fix=derived.scheduler_command(snapshot, "scontrol show job", job),
        )
    records = known(snapshot.operation.holds, ())
    held = held_jobs((job for job, _ in waiting), (record.job for record in records))
    for chosen, left in ((held.ours, ()), (held.others, held.ours)):
        for name in names_of(chosen, left):
            jobs = [job for job in chosen if covers(name, job)]
            by = None
            if chosen is held.ours:
                by = record_of(jobs[0], records)
            is_fault = by is not None and by.is_for_fault and not finished
            is_leaving = is_fault and by is not None and _is_leaving(snapshot, by)
            shown = jobs[0].job_id if len(jobs) == 1 else name
            if by is not None and stop is not None:
                usual = Severity.INFO
            else:
                usual = Severity.WARNING
            release = ""
            if snapshot.scheduler == "slurm":
                release = f"scontrol release {shlex.quote(name)}"
            if by is not None:
                refused = derived.was_refused(snapshot)  # the same card would be refused again
                release = derived.command(snapshot, "launch --replace" if refused else "resume")
            cancel = derived.scheduler_command(snapshot, "scancel", jobs[0]) or (
                derived.command(snapshot, "launch --repair") if by is not None else ""
            )
            effect = (
                "the training is finished, nothing is left for it"
                if finished
                else "it starts when it is released"
            )
            title = f"job {shown} is held ({jobs[0].reason}): {effect}"
            if is_fault and by is not None and by.why and not _is_told_by_its_attempt(snapshot):
                title = f"{by.why}: job {shown} is held, it would meet the same"
            yield Finding(
                NAME,
                _severity(idle, finished or is_leaving, usual),
                title,
                subject=name,
                evidence=()
                if by is None
                else (f"by {by.who or 'tr11'}" + (f", because: {by.why}" if by.why else ""),),
                fix=_what_helps(snapshot, cancel, release, finished, is_fault),
                then=(release,) if is_fault and not _is_queued_anew(snapshot) else (),
                fault=HELD_FOR_FAULT if is_fault else "",
            )


def _severity(idle: bool, needs_no_one: bool, usual: Severity) -> Severity:
    if needs_no_one:
        return Severity.INFO
    if idle:
        return Severity.CRITICAL
    return usual


def _is_leaving(snapshot: Snapshot, by: HoldRecord) -> bool:
    """Whether the attempt that held what is queued for its fault is still on its way out: its end
    says why, in a moment, and what helps.
    """
    if by.time is None or snapshot.time - by.time > LEAVING_SECONDS:
        return False
    return any(
        job.start_time is not None and job.start_time < by.time for job in snapshot.active_jobs
    )


def holds_as_it_leaves(snapshot: Snapshot) -> bool:
    """Whether an attempt on its way out has held what is queued for its fault."""
    records = known(snapshot.operation.holds, ())
    held = held_jobs(snapshot.pending_jobs, (record.job for record in records))
    holds = [record_of(job, records) for job in held.ours]
    return any(
        hold is not None and hold.is_for_fault and _is_leaving(snapshot, hold) for hold in holds
    )


def _what_helps(
    snapshot: Snapshot, cancel: str, release: str, finished: bool, is_fault: bool
) -> str:
    """What is held for a fault meets the same when it is released: first the fault must be found."""
    if finished:
        return cancel
    if is_fault:
        newest = derived.last_attempt(snapshot)
        return derived.command(
            snapshot,
            "logs" if newest is None else f"diagnose --job {newest.label or newest.job_id}",
        )
    return release


def _is_queued_anew(snapshot: Snapshot) -> bool:
    """Whether what helps with the attempt's fault cancels what is held, and launches in its place."""
    newest = derived.last_attempt(snapshot)
    return newest is not None and "--replace" in passes_over_the_data(snapshot, newest).split()


def _is_told_by_its_attempt(snapshot: Snapshot) -> bool:
    """Whether the attempt that held it is known to have ended badly, and so says why
    (unfinished-end).
    """
    newest = derived.last_attempt(snapshot)
    return newest is not None and is_bad(newest)

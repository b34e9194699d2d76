"""Queued work: what is held, what can never start, and where the queue ends."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tr11ops.base.observed import known
from tr11ops.base.units import duration
from tr11ops.cluster.arrays import array_number, covers, names_of
from tr11ops.cluster.pending_reasons import Cause, Wait, reason_of_job
from tr11ops.detect.detector import HELD_FOR_FAULT, Finding, Severity, detector
from tr11ops.detect.nodes_left import after_hold, asks_too_many, release_of_ours, start_of
from tr11ops.detect.unfinished_end import is_bad, passes_over_the_data
from tr11ops.observe import derived
from tr11ops.observe.forecast import end_of, no_cover, queue_coverage_seconds, trains_on
from tr11ops.observe.jobs import held_jobs, misplaced, record_of, way_out
from tr11ops.observe.liveness import is_leaving
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.hold_store import HoldRecord

WANT_OF_NODES = "nodes"  # as `fault`: it asks for more than can be used


@detector(
    "dead-chain",
    needs=("jobs",),
    bound="the scheduler's reason",
    severities="CRITICAL",
)
def dead_chain(snapshot: Snapshot) -> Iterator[Finding]:
    """Queued work that can never start as it stands: a dependency that cannot be met, a request that
    cannot be served.

    One finding per queued job, by the scheduler's own reason: PENDING is not waiting.
    """
    for job in snapshot.pending_jobs:
        row = reason_of_job(job)
        if row.cause is Cause.REQUEST:
            fix, *then = start_of(snapshot, job)
            evidence = (
                row.meaning,
                *((f"dependency: {job.dependency}",) if job.dependency else ()),
            )
            yield Finding(
                dead_chain.name,
                Severity.CRITICAL,
                f"job {job.job_id} can never start: {job.reason}",
                subject=array_number(job),
                evidence=evidence,
                fix=fix,
                then=tuple(then),
                fault=WANT_OF_NODES if asks_too_many(snapshot, job) else "",
            )


LEAVING_SECONDS = 300.0  # of an attempt whose last act was to hold what is queued


@detector(
    "held",
    needs=("jobs",),
    uses=("kill_switch", "pause"),
    bound="the scheduler's reason",
    severities=(
        "INFO where tr11 holds it for a kill switch or a pause, while its attempt leaves, or where all is"
        " trained, else WARNING (also for the tasks of an array that a person holds beside that); CRITICAL when"
        " nothing else can run"
    ),
    runbook="array-held.md",
)
def held(snapshot: Snapshot) -> Iterator[Finding]:
    """Queued work that waits for a person: someone, or the scheduler, holds it, or why it waits is not
    known.

    CRITICAL when nothing else of the run can run, else a warning that the chain stops after the
    present task.

    One finding for each array, and another for the part of it that tr11 did not hold. What tr11 holds, by its own
    record, is released by `tr11 resume`, or queued again with a corrected card (`tr11 launch --replace`) where the
    trainer refused the last attempt's; while a kill switch or a pause is in force, someone wants it so: INFO.
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
        severity = Severity.CRITICAL if idle else Severity.WARNING
        why = f"waits for a reason that tr11 does not know: {job.reason}"
        yield Finding(
            held.name,
            severity,
            _headed(severity, f"job {job.job_id} {why}"),
            subject=number,
            fix=start_of(snapshot, job)[0],
        )
    records = known(snapshot.operation.holds, ())
    by_whom = held_jobs((job for job, _ in waiting), (record.job for record in records))
    for chosen, left in ((by_whom.ours, ()), (by_whom.others, by_whom.ours)):
        for name in names_of(chosen, left):
            jobs = [job for job in chosen if covers(name, job)]
            by = None
            if chosen is by_whom.ours:
                by = record_of(jobs[0], records)
            is_fault = by is not None and by.is_for_fault and not finished
            it_leaves = is_fault and by is not None and _holder_leaves(snapshot, by)
            shown = jobs[0].job_id if len(jobs) == 1 else name
            if by is not None and stop is not None:
                usual = Severity.INFO
            else:
                usual = Severity.WARNING
            release = ""
            if snapshot.scheduler == "slurm":
                release = f"scontrol release {shlex.quote(name)}"
            if by is not None:
                release = release_of_ours(snapshot)
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
            if finished:
                fix, *then = (cancel,)
            elif is_fault and by is not None:
                fix, *then = _after_fault(snapshot, by, release)
            else:
                fix, *then = (release,)
            severity = _severity(idle, finished or it_leaves, usual)
            yield Finding(
                held.name,
                severity,
                _headed(severity, title),
                subject=name,
                evidence=()
                if by is None
                else (f"by {by.who or 'tr11'}" + (f", because: {by.why}" if by.why else ""),),
                fix=fix,
                then=tuple(then),
                fault=HELD_FOR_FAULT if is_fault else "",
            )


def _headed(severity: Severity, title: str) -> str:
    """The title of what cannot start: where it is CRITICAL, for no other job of the run trains, it
    begins with that, for it may have been told as a warning before.
    """
    return f"nothing trains: {title}" if severity is Severity.CRITICAL else title


def _severity(idle: bool, needs_no_one: bool, usual: Severity) -> Severity:
    if needs_no_one:
        return Severity.INFO
    if idle:
        return Severity.CRITICAL
    return usual


def _holder_leaves(snapshot: Snapshot, by: HoldRecord) -> bool:
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
    by_whom = held_jobs(snapshot.pending_jobs, (record.job for record in records))
    holds = [record_of(job, records) for job in by_whom.ours]
    return any(
        hold is not None and hold.is_for_fault and _holder_leaves(snapshot, hold) for hold in holds
    )


def _after_fault(snapshot: Snapshot, by: HoldRecord, release: str) -> tuple[str, ...]:
    """What is held for a fault meets the same when it is released: first the fault must be found.

    It is not released where what helps cancels it, and launches in its place.
    """
    way_out = after_hold(snapshot, by.why)
    newest = derived.last_attempt(snapshot)
    if way_out:
        return way_out
    if newest is None:
        return derived.command(snapshot, "logs"), release
    look = derived.command(snapshot, f"diagnose --job {newest.label or newest.job_id}")
    if "--replace" in passes_over_the_data(snapshot, newest).split():
        return (look,)
    return look, release


def _is_told_by_its_attempt(snapshot: Snapshot) -> bool:
    """Whether the attempt that held it is known to have ended badly, and so says why
    (unfinished-end).
    """
    newest = derived.last_attempt(snapshot)
    return newest is not None and is_bad(newest)


@detector(
    "limit-reached",
    needs=("jobs",),
    uses=("nodes", "kill_switch", "pause"),
    bound="the scheduler's reason",
    severities="WARNING, CRITICAL when nothing else can run",
)
def limit_reached(snapshot: Snapshot) -> Iterator[Finding]:
    """Queued work that a limit of the partition, account or QoS keeps from starting: used up, or below
    what it asks.

    Also work that someone has moved to a partition which has not got the nodes: Slurm then still says
    that it waits.

    One finding for each array: CRITICAL when nothing else of the run can run, else a WARNING.
    """
    severity = Severity.CRITICAL if derived.is_idle(snapshot) else Severity.WARNING
    yield from blocked(
        snapshot, limit_reached.name, cause=Cause.LIMIT, how="over a limit", severity=severity
    )
    told = {
        array_number(job)
        for job in snapshot.pending_jobs
        if reason_of_job(job).cause is Cause.LIMIT
    }
    wrong = {
        array_number(job): job
        for job in snapshot.pending_jobs
        if reason_of_job(job).wait is Wait.PASSES
    }
    for number, job in wrong.items():
        why = misplaced(snapshot, job)
        if why and number not in told:
            yield Finding(
                limit_reached.name,
                severity,
                _headed(severity, f"job {job.job_id} can never start in partition {job.partition}"),
                subject=number,
                evidence=(
                    why,
                    f"`scontrol update JobId={number} Partition=NAME` keeps its place in the queue",
                ),
                fix=derived.command(snapshot, "launch --replace"),
            )


@detector(
    "reservation-ended",
    needs=("jobs",),
    uses=("kill_switch", "pause"),
    bound="the scheduler's reason",
    severities="WARNING, CRITICAL when nothing else can run",
)
def reservation_ended(snapshot: Snapshot) -> Iterator[Finding]:
    """Queued work whose reservation has ended, or was taken away: the scheduler keeps it, and never
    starts it.

    One finding for each array: CRITICAL when nothing else of the run can run, else a WARNING.
    """
    severity = Severity.CRITICAL if derived.is_idle(snapshot) else Severity.WARNING
    yield from blocked(
        snapshot,
        reservation_ended.name,
        cause=Cause.RESERVATION,
        how="without its reservation",
        severity=severity,
    )


SHOWN = 3  # of what is no cover


@detector(
    "chain-end",
    needs=("jobs", "kill_switch", "pause", "steps", "submissions", "attempts", "nodes"),
    bound="`watch.tasks_left` (2)",
    severities="WARNING",
)
def chain_end(snapshot: Snapshot) -> Iterator[Finding]:
    """The array's end is in sight: the queued tasks do not cover the training that is left.

    WARNING when fewer than watch.tasks_left tasks wait behind the one that trains now, or that
    trains next.

    Silent when those that are left cover the rest of the training, and where some of them start
    when the site is done. Tasks for which too few nodes can be used cover nothing; nodes-short
    tells of them. Nor is it told while an attempt leaves that has held what is queued for its
    fault: its end says why, and what helps; nor of an attempt that leaves with nothing behind it,
    after which nothing can be queued any more; nor before the steps of a new attempt have shown
    how fast it is.
    """
    active = tuple(job for job in trains_on(snapshot) if not is_leaving(snapshot, job))
    waiting = derived.sure_jobs(snapshot)
    if (not active and not waiting) or derived.stop_of(snapshot) is not None:
        return
    if snapshot.run.is_watched:
        return  # what comes after it is someone else's to say
    end = end_of(snapshot)
    if end is None and derived.total_iterations(snapshot) is not None:
        return  # the first steps tell how long all takes
    if (
        derived.some_wait_for_site(snapshot)
        or derived.some_wait_for_nodes(snapshot)
        or holds_as_it_leaves(snapshot)
    ):
        return  # another launch would meet the same
    tasks = derived.queued_tasks(waiting) + len(active) + derived.tasks_to_come(snapshot)
    covered = queue_coverage_seconds(snapshot, only_sure=True)
    remaining = None if end is None else end.earliest
    behind = tasks - 1
    if behind >= snapshot.run.watch.tasks_left:
        return
    if remaining is not None and covered is not None and remaining <= covered:
        return
    last = "the last task of the queue " + ("is running" if active else "is waiting")
    if behind == 1:
        more = "one more task is"
    else:
        more = f"{behind} more tasks are"
    if behind < 1:
        title = last
    else:
        title = f"{more} queued after " + ("this one" if active else "the next one")
    evidence = []
    if remaining is not None:
        if covered is None:
            held = ""
        else:
            held = f", the queue holds {duration(covered)}"
        evidence.append(f"{duration(remaining)} of training are left{held}")
    evidence += [f"no cover is {one}" for one in no_cover(snapshot)[:SHOWN]]
    yield Finding(
        chain_end.name,
        Severity.WARNING,
        title,
        subject=derived.last_of_queue(snapshot),
        evidence=tuple(evidence),
        fix=derived.launch_more(snapshot),
    )


def blocked(
    snapshot: Snapshot, detector: str, cause: Cause, how: str, severity: Severity
) -> Iterator[Finding]:
    """A finding for each array or job that waits for this cause; `how` it waits, in words."""
    rows = [(job, reason_of_job(job)) for job in snapshot.pending_jobs]
    jobs = {
        array_number(job): job
        for job, row in rows
        if row.cause is cause and row.wait is not Wait.PASSES
    }
    for number, job in jobs.items():
        fix, *then = start_of(snapshot, job)
        yield Finding(
            detector,
            severity,
            _headed(severity, f"job {job.job_id} waits {how}: {job.reason}"),
            subject=number,
            evidence=(reason_of_job(job).meaning, way_out(job)),
            fix=fix,
            then=tuple(then),
        )

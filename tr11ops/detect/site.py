"""What the site gives, and when: closed partitions, long queues, too few nodes, other time limits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC

from tr11ops.base.observed import known, seen
from tr11ops.base.units import counted, duration, first_few, timestamp
from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.base import Job, Node
from tr11ops.cluster.pending_reasons import PARTITION_CLOSED, Cause, Wait, reason_of_job
from tr11ops.detect.detector import Finding, Severity, detector
from tr11ops.detect.nodes_left import (
    fault_of_cap,
    fewer_spares,
    needed_next,
    nodes_of_partition,
    partition_of,
    take_back,
    usable_nodes,
)
from tr11ops.observe import derived
from tr11ops.observe.forecast import queue_coverage_seconds
from tr11ops.observe.jobs import is_shut, way_out
from tr11ops.observe.liveness import liveness_outside, may_live_outside
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.exclusion import Exclusion

NIGHT_SECONDS = 12 * derived.HOUR


@detector(
    "waits-for-site",
    needs=("jobs",),
    uses=("nodes", "kill_switch", "pause"),
    bound="the scheduler's reason; 12 h",
    severities=(
        "INFO, WARNING when nothing runs, when what runs and starts by itself lasts less than 12 h, or when a closed"
        " partition lets nothing start after what runs, CRITICAL when it lets nothing train"
    ),
)
def waits_for_site(snapshot: Snapshot) -> Iterator[Finding]:
    """Queued work that starts when the site lets it: a partition that is down or closed, nodes kept
    for maintenance.

    One finding for each array. CRITICAL when nothing trains because the site has closed the
    partition, which no one of the run may have planned. What a maintenance keeps waiting goes on by
    itself, and was announced: a WARNING.

    While a job runs, or something starts by itself: a WARNING where that lasts less than 12 hours,
    and where a partition is closed and nothing else is queued; else INFO.
    """
    told = [job for job in snapshot.pending_jobs if reason_of_job(job).wait is Wait.SITE]
    shut = [
        job
        for job in snapshot.pending_jobs
        if reason_of_job(job).wait is Wait.PASSES and is_shut(snapshot, job)
    ]
    # of a part that waits for another one too, the scheduler tells that alone
    jobs = {array_number(job): job for job in (*shut, *told)}
    for number, job in jobs.items():
        severity, title = _how_it_waits(snapshot, job)
        where = job.partition or "the partition"
        yield Finding(
            waits_for_site.name,
            severity,
            title,
            subject=number,
            evidence=(
                f"{derived.site_reason(job).meaning}: it starts by itself when the site is done",
                f"only the site can change that, for all runs in {where}: ask when; the command shows how it is now",
            ),
            fix=f"scontrol show partition {job.partition}"
            if snapshot.scheduler == "slurm" and job.partition
            else "",
            by_itself="What is queued starts by itself when the site is done.",
        )


def _how_it_waits(snapshot: Snapshot, job: Job) -> tuple[Severity, str]:
    """How grave it is that a job waits for the site, and the words for it."""
    is_closed = reason_of_job(job) is PARTITION_CLOSED or is_shut(snapshot, job)
    if is_closed:
        partition = "its partition"
        if job.partition:
            partition = f"partition {job.partition}"
        what = f"the site has closed {partition}"
    else:
        what = f"job {job.job_id} waits for the site ({job.reason})"
    if derived.stop_of(snapshot) is not None:
        return Severity.INFO, what
    if derived.closed_by_site(snapshot) is not None:
        severity = Severity.CRITICAL if is_closed else Severity.WARNING
        return severity, f"{what}: nothing trains"
    covered = queue_coverage_seconds(snapshot, only_sure=True)
    severity = Severity.INFO
    if covered is not None and covered < NIGHT_SECONDS:
        severity = Severity.WARNING
    if derived.sure_jobs(snapshot) or not snapshot.active_jobs:
        if is_closed:
            what = f"{what}: job {job.job_id} cannot start"
        return severity, what
    if is_closed:
        severity = Severity.WARNING
    # what a subject may have no room for stands last
    return severity, f"nothing starts after {_until_when(snapshot)}: {what}"


def _until_when(snapshot: Snapshot) -> str:
    """The running job that ends last, and when it does, as far as that is known."""
    ends: list[tuple[float, str]] = []
    for job in snapshot.active_jobs:
        end = derived.leaves_at(snapshot, job)
        if end is None:
            return f"job {job.job_id} (until when it lasts is not known)"
        ends.append((end, job.job_id))
    end, name = max(ends)
    return f"job {name} (until {timestamp(end, UTC)} at most)"


NAMES_SHOWN = 8
# Slurm's own reason for a node that it has lost; once such a node answers, it is back when it has
# registered. Slurm 24.11 loses nodes for seconds that are well: those that it asks by way of a
# frozen one.
LOST_REASON = "not responding"
ANSWERS_AGAIN_SECONDS = 60.0


@detector(
    "nodes-short",
    needs=("nodes", "exclusions", "jobs"),
    bound="at once",
    severities="WARNING, CRITICAL when nothing runs, but for a maintenance",
    runbook="queued-too-long.md",
)
def nodes_short(snapshot: Snapshot) -> Iterator[Finding]:
    """The partition has fewer usable nodes than one attempt needs: only the site, or a smaller card,
    helps.

    CRITICAL when nothing of the run has an allocation, for no attempt can start; WARNING while
    one has.

    A maintenance gives the nodes back by itself: WARNING too.
    """
    usable, needed = usable_nodes(snapshot), needed_next(snapshot)
    if usable is None or needed is None or usable >= needed:
        return
    partition = partition_of(snapshot)
    nodes = nodes_of_partition(snapshot, partition)
    if len(nodes) < needed:  # the card asks for more than there is, which a launch refuses
        return
    # a controller that has just begun knows no node yet
    may_come = sum(node.is_unknown or _answers_again(node, snapshot.time) for node in nodes)
    if usable + may_come >= needed:
        return
    excluded: tuple[Exclusion, ...] = seen(snapshot.exclusions)
    listed = {entry.node for entry in excluded}
    gone = [
        f"{node.name} ({' '.join(sorted(node.states))})" for node in nodes if not node.is_usable
    ]
    kept_off = sorted(node.name for node in nodes if node.is_usable and node.name in listed)
    total, where = counted(len(nodes), "node"), f" in {partition}" if partition else ""
    evidence = [f"{total}{where}, {usable} usable, {needed} needed"]
    evidence += [f"not usable: {first_few(gone, NAMES_SHOWN)}"] if gone else []
    evidence += [f"excluded by the run: {first_few(kept_off, NAMES_SHOWN)}"] if kept_off else []
    fewer = _with_fewer_spares(snapshot, usable)
    if fewer:
        evidence.append(
            "what is queued starts by itself when its nodes are back; the command queues it with fewer spares"
        )
    trains = bool(snapshot.active_jobs)
    is_closed = derived.closed_by_site(snapshot) is not None
    need, further = counted(needed, "is", "are"), "further " if trains else ""
    yield Finding(
        nodes_short.name,
        Severity.WARNING if trains or is_closed else Severity.CRITICAL,
        f"{usable} of {total} can be used, {need} needed: no {further}attempt can start",
        subject=partition,
        evidence=tuple(evidence),
        fix=take_back(snapshot, kept_off) or fewer or derived.command(snapshot, "nodes list"),
        fault=fault_of_cap(snapshot),
    )


def _answers_again(node: Node, now: float) -> bool:
    """Whether the scheduler lost it a moment ago and has heard of it since."""
    is_recent = node.reason_time is not None and now - node.reason_time < ANSWERS_AGAIN_SECONDS
    was_lost = node.is_gone and node.reason.casefold().startswith(LOST_REASON)
    return is_recent and was_lost and not node.is_silent


def _with_fewer_spares(snapshot: Snapshot, usable: int) -> str:
    """The command that queues the waiting attempts again with as many spares as there are; "" where
    those that train would not fit, or where nothing of the run's waits that may start now.
    """
    spares = fewer_spares(snapshot, usable)
    is_closed = derived.some_wait_for_site(snapshot) or derived.stop_of(snapshot) is not None
    if not spares or snapshot.active_jobs or is_closed:
        return ""
    if not derived.some_wait_for_nodes(snapshot) and not any(
        map(derived.is_dead, snapshot.pending_jobs)
    ):
        return ""
    return derived.command(snapshot, f"launch --replace {spares}")


CRITICAL_FACTOR = 3.0  # times watch.longest_queue_minutes
# Waiting for a time or for another task, not for nodes. Prefixes, as versions of Slurm add words.
OTHER_REASONS = ("BeginTime", "Dependency")
# Waiting for a task of its own array. Where none runs, Slurm has miscounted: 22.05 does so when it
# is started again while a task lives on that has lost a node, and then starts no other one ever.
BEHIND_ANOTHER = "JobArrayTaskLimit"


@detector(
    "queued-too-long",
    needs=("jobs", "kill_switch", "pause", "attempts", "heartbeats"),
    uses=("steps",),
    bound="`watch.longest_queue_minutes`, also where the scheduler expects it to start later than that; 3 times that",
    severities="WARNING, CRITICAL",
)
def queued_too_long(snapshot: Snapshot) -> Iterator[Finding]:
    """Nothing trains, and the first task has waited for nodes for longer than the card expects.

    WARNING after watch.longest_queue_minutes, CRITICAL after three times that; only while
    nothing of the run runs.

    So too for jobs that wait for other jobs below a limit: it passes by itself, or shows by its age
    that it does not.

    Counted from when the task could start: its submission or release, or the end of the task before
    it. WARNING at once where the scheduler itself expects the first start later than that from now,
    or someone has set such a time.
    """
    if may_live_outside(snapshot):
        return  # it may train outside the scheduler
    if (
        snapshot.active_jobs
        or derived.stop_of(snapshot) is not None
        or liveness_outside(snapshot) is not None
    ):
        return
    limit = 60.0 * snapshot.run.watch.longest_queue_minutes
    waiting = [
        (since, job)
        for job in derived.startable_jobs(snapshot)
        if not job.reason.startswith(OTHER_REASONS)
        and reason_of_job(job).wait is Wait.PASSES
        and (since := waits_since(snapshot, job)) is not None
    ]
    late = _late_start(snapshot, limit)
    oldest = min(waiting, key=lambda pair: (pair[0], pair[1].raw_id), default=None)
    if oldest is None or snapshot.time - oldest[0] <= limit:
        if late is not None:
            yield _expected_late(snapshot, late)
        return
    since, job = oldest
    waited = snapshot.time - since
    evidence = [f"reason: {job.reason or 'none given'}"]
    if late is not None:
        evidence.append(_expectation(snapshot, late))
    row = reason_of_job(job)
    if row.cause is Cause.LIMIT:
        evidence += [row.meaning, way_out(job)]
    what = "room below a limit" if row.cause is Cause.LIMIT else "nodes"
    if job.reason.startswith(BEHIND_ANOTHER):
        evidence.append(
            "no task of its array runs: the scheduler has miscounted, and starts none until they are queued again"
        )
        what = "a task of its own array, none of which runs,"
    left = usable_nodes(snapshot, job.partition)
    if left is not None and job.node_count:
        asked = counted(job.node_count, "node is", "nodes are")
        evidence.append(f"{asked} asked for, {left} of the partition are usable and not excluded")
    yield Finding(
        queued_too_long.name,
        Severity.CRITICAL if waited > CRITICAL_FACTOR * limit else Severity.WARNING,
        f"nothing trains: job {job.job_id} has waited for {what} for {duration(waited)}",
        subject=array_number(job),
        evidence=tuple(evidence),
        fix=derived.command(
            snapshot, "launch --replace" if job.reason.startswith(BEHIND_ANOTHER) else "nodes list"
        ),
        since=since,
    )


def _late_start(snapshot: Snapshot, limit: float) -> Job | None:
    """The job that is expected to start first, where that is more than `limit` seconds away; None
    where one may start earlier, or the scheduler does not say of one when it will.
    """
    first = [
        job
        for job in derived.startable_jobs(snapshot)
        if reason_of_job(job).wait is Wait.PASSES
        and not job.reason.startswith(("Dependency", BEHIND_ANOTHER))
    ]
    starts = [job.start_time for job in first if job.start_time is not None]
    if not first or len(starts) < len(first) or min(starts) - snapshot.time <= limit:
        return None
    return min(first, key=lambda job: (job.start_time or 0.0, job.raw_id))


def _expectation(snapshot: Snapshot, job: Job) -> str:
    wait = duration((job.start_time or snapshot.time) - snapshot.time)
    if job.reason.startswith("BeginTime"):
        return f"it may not start before its time, which is in {wait}"
    return f"the scheduler expects job {job.job_id} to start in {wait}, should all before it use their whole time"


def _expected_late(snapshot: Snapshot, job: Job) -> Finding:
    start = timestamp(job.start_time or snapshot.time, UTC)
    fix = derived.command(snapshot, "nodes list")
    if job.reason.startswith("BeginTime") and snapshot.scheduler == "slurm":
        fix = f"scontrol update JobId={array_number(job)} StartTime=now"
    return Finding(
        queued_too_long.name,
        Severity.WARNING,
        f"nothing trains: job {job.job_id} is not expected to start before {start}",
        subject=array_number(job),
        evidence=(f"reason: {job.reason or 'none given'}", _expectation(snapshot, job)),
        fix=fix,
    )


def waits_since(snapshot: Snapshot, job: Job) -> float | None:
    """When the job could start at the earliest; None where its submission is not known."""
    if job.submit_time is None:
        return None
    ends = [
        other.end_time
        for other in known(snapshot.jobs, ())
        if other.state.is_final and other.end_time is not None
    ]
    ends += [attempt.changed for attempt in known(snapshot.attempts, ())]
    # not every answer of the scheduler tells since when it may start
    released = snapshot.operation.holds_changed
    return max([job.submit_time, job.eligible_time or 0.0, released or 0.0, *ends])


ROUNDING_SECONDS = 60.0


@detector(
    "limit-changed",
    needs=("jobs",),
    bound="a minute, to which Slurm rounds limits",
    severities="WARNING, INFO where the limit is longer than the card's",
)
def limit_changed(snapshot: Snapshot) -> Iterator[Finding]:
    """The running job's time limit is not that of the card it was launched with: someone has changed
    it at the scheduler.

    The attempt follows the limit that its job has now; a shorter one trains less in each task,
    or too little.
    """
    others = derived.other_variants(snapshot)
    for job in snapshot.active_jobs:
        limit = job.time_limit_seconds
        plan = derived.exit_plan_of(snapshot, job)
        if plan is None or plan.limit is None or job.job_id in others:
            continue
        if limit is None or job.start_time is None:
            continue
        wanted = plan.limit
        if abs(limit - wanted) < ROUNDING_SECONDS:
            continue
        is_shorter = limit < wanted
        ends, said = job.start_time + limit, job.start_time + wanted
        scheduler = "Slurm" if snapshot.scheduler == "slurm" else "the scheduler"
        yield Finding(
            limit_changed.name,
            Severity.WARNING if is_shorter else Severity.INFO,
            f"{scheduler} ends job {job.job_id} at {timestamp(ends, UTC)}, the card says {timestamp(said, UTC)}",
            subject=job.job_id,
            evidence=(
                f"its time limit is {duration(limit)} now, the card's (slurm.time_limit) is {duration(wanted)}",
            ),
            fix=derived.command(snapshot, f"checkpoint-now --job {job.job_id}")
            if is_shorter
            else "",
            by_itself="The attempt saves and leaves in time by itself, unless the limit is too short for a save.",
        )

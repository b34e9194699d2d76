"""Attempts: none is there, two are at once, one could not start, waits suspended, or does not
leave; and what is known of an end that nothing explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tr11ops.base.observed import known
from tr11ops.base.redact import signature
from tr11ops.base.units import duration, first_few
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.detector import Finding, Severity, detector
from tr11ops.observe import derived
from tr11ops.observe.liveness import (
    ENDED_PHASE,
    beats_of,
    liveness_of,
    liveness_outside,
    may_live_outside,
)
from tr11ops.observe.snapshot import Attempt, Snapshot
from trainer.contract.attempt import BAD_REASONS, EndMarker

if TYPE_CHECKING:
    from tr11ops.trainers.levels import TrainerStanding


@detector(
    "down",
    needs=("jobs", "kill_switch", "pause", "attempts", "last_end", "heartbeats"),
    uses=("steps",),
    bound="at once",
    severities="CRITICAL",
)
def down(snapshot: Snapshot) -> Iterator[Finding]:
    """Nothing runs and nothing is queued, though the training is neither finished nor stopped by
    someone.

    Silent unless jobs and the kill switch were really seen: absence is never concluded from
    silence.
    """
    if derived.stop_of(snapshot) is not None or snapshot.active_jobs or snapshot.pending_jobs:
        return
    if derived.is_finished(snapshot) or liveness_outside(snapshot) is not None:
        return
    if derived.is_cancelled_by_owner(snapshot):
        return
    if may_live_outside(snapshot):
        return  # it may train outside the scheduler
    yield Finding(
        down.name,
        Severity.CRITICAL,
        f"{snapshot.run.name} is neither running nor queued",
        evidence=tuple(_evidence(snapshot)),
        fix=derived.command(snapshot, _what_helps(snapshot)),
        then=(derived.command(snapshot, derived.launch_again(snapshot)),),
        since=_since(snapshot),
    )


def _since(snapshot: Snapshot) -> float | None:
    """When the last of it ended, as far as that is known; None where a person had stopped the run
    until some time.
    """
    marker = derived.last_marker(snapshot)
    attempts = known(snapshot.attempts, ())
    if not attempts or (marker is not None and marker.reason in {"kill-switch", "pause"}):
        return None
    jobs = (*known(snapshot.jobs, ()), *known(snapshot.operation.ended_jobs, ()))
    ended = [job.end_time for job in jobs if job.end_time is not None and job.state.is_final]
    submitted = [entry.time for entry in known(snapshot.submissions, ())]
    return max(*(attempt.changed for attempt in attempts), *ended, *submitted, 0.0)


def _what_helps(snapshot: Snapshot) -> str:
    """The launch that was last typed, once more; but first a look, where the same launch would fail
    the same way.
    """
    marker = derived.last_marker(snapshot)
    if marker is not None and marker.reason in BAD_REASONS:
        return "logs"
    return derived.launch_again(snapshot)


def _evidence(snapshot: Snapshot) -> Iterator[str]:
    marker = derived.last_marker(snapshot)
    if marker is not None:
        if marker.reason == "refused":
            yield f"the last attempt refused to start: {marker.message}"
        elif marker.reason == "unexplained":
            yield f"nothing explains how the last attempt ended: {marker.message}"
        else:
            yield f"the last attempt that left word ended by {marker.reason} {marker.place}"
    newest = next(iter(known(snapshot.submissions, ())), None)
    if newest is None:
        yield "nothing was ever submitted from this run directory"
    elif newest.job_id is None:
        yield f"the scheduler never said whether it took submission {newest.tag}"
    else:
        yield f"the last submission was job {newest.job_id}" + (
            f", array {newest.array}" if newest.array else ""
        )


LOOKING_SECONDS = 120.0  # for a task to see that another one of its array trains, and to leave


@detector(
    "two-attempts",
    needs=("jobs",),
    bound="at once; 2 minutes for the next task of the array",
    severities="CRITICAL",
    runbook="two-trainers.md",
)
def two_attempts(snapshot: Snapshot) -> Iterator[Finding]:
    """Two jobs of this run are running at once: two trainers on one checkpoint directory is the worst
    case of all.

    A task that Slurm starts beside another one of its array, because that has lost a node, looks and
    gives way by itself.

    One finding for all of them; the fix cancels the one that started last.
    """
    running = sorted(
        (job for job in snapshot.active_jobs if job.state is JobState.RUNNING),
        key=lambda job: job.start_time or 0.0,
    )
    running = [job for job in running if not _still_looks(snapshot, job, running[0])]
    if len(running) < 2:
        return
    names = ", ".join(job.job_id for job in running)
    yield Finding(
        two_attempts.name,
        Severity.CRITICAL,
        f"{len(running)} jobs of this run are running at once: {names}",
        subject=names,
        evidence=tuple(
            f"{job.job_id} of {job.user}: {job.comment or 'no comment'}" for job in running
        ),
        fix=derived.scheduler_command(snapshot, "scancel", running[-1]),
    )


def _still_looks(snapshot: Snapshot, job: Job, first: Job) -> bool:
    """Whether a job has just begun as the next task of the first one's array, and no trainer of it
    is seen to live.

    Where heartbeats cannot be seen it has the same time: that it trains is not concluded from not
    seeing.
    """
    if (
        job is first
        or job.array_id is None
        or job.array_id != first.array_id
        or job.start_time is None
    ):
        return False
    if beats_of(snapshot, job):
        return False
    return snapshot.time - job.start_time < LOOKING_SECONDS


@detector(
    "start-failed",
    needs=("jobs", "attempts", "last_end"),
    bound="no attempt since",
    severities="CRITICAL; WARNING while the next job has not begun to work",
)
def start_failed(snapshot: Snapshot) -> Iterator[Finding]:
    """The last attempt never came to train: its set-up failed or hung, or its agent could not begin
    after it.

    It stands until the next attempt begins: each one would end in the same way, so what is queued
    is held. A job that only got its nodes proves nothing.
    """
    newest, marker = derived.last_attempt(snapshot), derived.last_marker(snapshot)
    on_record = {attempt.job_id for attempt in known(snapshot.attempts, ())}
    if any(derived.identifiers(job) & on_record for job in snapshot.active_jobs):
        return
    if (
        newest is None
        or marker is None
        or newest.end != marker
        or marker.reason != "refused"
        or marker.launch
    ):
        return
    is_tried = bool(snapshot.active_jobs)
    look, go_on = derived.command(snapshot, "doctor"), derived.command(snapshot, "resume")
    order, then = f"repair what `{look}` refuses, which tries slurm.setup here", tuple[str, ...]()
    if snapshot.pending_jobs and not is_tried:
        order, then = f"{order}; then let the tasks start with `{go_on}`", (go_on,)
    yield Finding(
        start_failed.name,
        Severity.WARNING if is_tried else Severity.CRITICAL,
        f"attempt {newest.label or newest.job_id} could not start: {marker.message}",
        subject=newest.label or newest.job_id,
        evidence=(order, *(f"it printed: {line}" for line in newest.evidence)),
        identity=(signature(marker.message) or marker.reason,),
        fix=look,
        then=then,
        is_to_be_passed=is_tried,
        since=newest.changed,
    )


@detector(
    "suspended",
    needs=("jobs",),
    bound="at once",
    severities="CRITICAL",
)
def suspended(snapshot: Snapshot) -> Iterator[Finding]:
    """A job of this run is suspended: it holds its place and does nothing until someone resumes it.

    One finding for each suspended job.
    """
    for job in snapshot.active_jobs:
        if job.state is JobState.SUSPENDED:
            yield Finding(
                suspended.name,
                Severity.CRITICAL,
                f"job {job.job_id} is suspended",
                subject=job.job_id,
                fix=derived.scheduler_command(snapshot, "scontrol resume", job),
            )


@detector(
    "lingering",
    needs=("jobs", "attempts", "heartbeats", "steps", "training.launch_ends"),
    bound="15 minutes",
    severities="CRITICAL",
)
def lingering(snapshot: Snapshot) -> Iterator[Finding]:
    """The trainer has ended, but its job still holds the nodes: the next task cannot start, the hours
    are billed.

    Fires a while after the end marker, unless a later launch in the same allocation is alive.
    """
    for job in snapshot.active_jobs:
        marker = derived.marker_of(snapshot, derived.identifiers(job))
        if marker is None:
            continue
        liveness = liveness_of(snapshot, job)
        if liveness is not None and liveness.time > marker.time and liveness.phase != ENDED_PHASE:
            continue
        age = snapshot.time - marker.time
        if age > derived.LEAVING_SECONDS:
            yield Finding(
                lingering.name,
                Severity.CRITICAL,
                f"job {job.job_id} still holds its nodes {duration(age)} after the trainer ended",
                subject=job.job_id,
                evidence=(f"end marker: {marker.reason} {marker.place}, from {marker.host}",),
                fix=derived.command(snapshot, "kill --now --wait"),
                then=derived.go_on(snapshot),
            )


# ----------------------------------------------------------------------------- ends without a word
# What is known, and what is not, of an end of another trainer that nothing explains.


def is_without_word(snapshot: Snapshot, attempt: Attempt) -> bool:
    """Whether an attempt of another trainer than tr11's own ended badly, and nothing explains it."""
    return snapshot.run.standing is not None and (
        attempt.cause == "unknown" or _is_unexplained(attempt)
    )


def facts_and_gaps(snapshot: Snapshot, row: Sequence[Attempt]) -> Iterator[str]:
    """Lines for who has to find out: what these attempts, newest first, are known to have done, what is
    not known, and what to say in the card where its last step is not known.
    """
    standing, reached = snapshot.run.standing, _reached(snapshot, row)
    if standing is None:
        return
    yield f"known: {'; '.join(_known(snapshot, standing, reached))}"
    yield f"not known: {_not_known(standing, row[0])}"
    if reached and _is_unexplained(row[0]) and derived.total_iterations(snapshot) is None:
        yield f"if it was done at iteration {reached[-1]}: `trainer.steps = {reached[-1]}` in the card says so"


def look_at(snapshot: Snapshot, attempt: Attempt) -> str:
    """The command that shows what it said last."""
    return derived.command(snapshot, f"logs --attempt {attempt.label or attempt.job_id}")


def _is_unexplained(attempt: Attempt) -> bool:
    return isinstance(attempt.end, EndMarker) and attempt.end.reason == "unexplained"


def _reached(snapshot: Snapshot, row: Sequence[Attempt]) -> list[int]:
    """The iteration after which each launch of these attempts ended, oldest first; without those that
    finished none.
    """
    ends = derived.launch_ends(snapshot, {attempt.job_id for attempt in row})
    if ends:
        return [one.reached for one in ends if one.reached is not None]
    markers = [attempt.end for attempt in reversed(row) if isinstance(attempt.end, EndMarker)]
    return [marker.iteration for marker in markers if marker.iteration]


def _known(snapshot: Snapshot, standing: TrainerStanding, reached: list[int]) -> Iterator[str]:
    if not reached:
        yield "it finished no iteration"
    elif len(reached) == 1:
        yield f"it ended after iteration {reached[0]}"
    else:
        yield f"{len(reached)} launches ended so, after iterations {first_few(reached)}"
    saved = snapshot.newest_sound
    if saved is not None:
        yield f"the newest whole checkpoint is {standing.name_of(saved.step)}"


def _not_known(standing: TrainerStanding, newest: Attempt) -> str:
    if _is_unexplained(newest):
        return "why it left, unasked and without an error; what it said last may tell"
    if standing.is_watched:
        return "why: neither its log nor the scheduler tells"
    return "why: neither its log, nor how its workers ended, nor the nodes, nor the scheduler tell"

"""Looks once at a run: scheduler and run directory become one Snapshot. At most two calls to the
scheduler.

Nothing here raises for what could not be seen: that is `Unknown`, with its reason, in the snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import Observed, Unknown, all_unknown, cause, known, observed
from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.base import Job, JobState, Node, Overview
from tr11ops.cluster.pending_reasons import is_held
from tr11ops.observe import files
from tr11ops.observe.clock import (
    Moment,
    corrected_attempts,
    corrected_beats,
    corrected_steps,
    moment_of,
    skews,
)
from tr11ops.observe.jobs import (
    Ownership,
    why_unmounted,
    with_reasons_of_now,
    without_unclear,
)
from tr11ops.observe.observations import (
    LaunchEnd,
    OperationObservations,
    Readmission,
    TrainingObservations,
)
from tr11ops.observe.operation_files import see_operation
from tr11ops.observe.snapshot import (
    Attempt,
    RunFacts,
    Snapshot,
    Step,
    newest_attempt,
)
from tr11ops.observe.training_files import last_measured, see_training
from tr11ops.runcard.card import ForeignCard, OwnCard, RunCard
from tr11ops.rundir.action_log import DAY_SECONDS, replay
from tr11ops.rundir.attempts import LaunchRecord, last_sign_in, told_end
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.exclusions import CHECKED, INCLUDED, is_clean_speed
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.kill_switch import place_fault
from tr11ops.rundir.paths import RunDirectory, Submission, parse_comment
from tr11ops.rundir.state_files import find_damage
from trainer.config.card import RecoverySection
from trainer.contract.attempt import EndMarker, ExitTime, Heartbeat
from trainer.contract.origin import BranchOrigin
from trainer.contract.paths import RunPaths

if TYPE_CHECKING:
    from tr11ops.runcard.exit_duration import ExitPlan
    from tr11ops.trainers.levels import TrainerStanding
    from trainer.contract.compute_record import ComputeTimes


# Dates the ends of attempts that no end marker dates: by the scheduler, else by their last sign of
# life.


def dated(
    paths: RunPaths,
    attempts: Iterable[Attempt],
    jobs: Iterable[Job],
    ended_jobs: Iterable[Job],
    beats: Iterable[Heartbeat],
    steps: Iterable[Step],
) -> tuple[Attempt, ...]:
    """The attempts with their ends, the newest first. `ended_jobs`: by the scheduler's own log.

    Of one that lives only what was read anyway counts; the folder of one that is over is looked
    through.
    """
    by_id = {job.raw_id: job for job in ended_jobs}
    by_id |= {job.raw_id: job for job in jobs if not job.state.is_final or job.end_time is not None}
    signs: dict[str, float] = {}
    for beat in beats:
        signs[beat.job_id] = max(signs.get(beat.job_id, 0.0), beat.time)
    for step in steps:
        if step.time is not None:
            signs[step.job_id] = max(signs.get(step.job_id, 0.0), step.time)
    found = [_dated(paths, attempt, by_id.get(attempt.job_id), signs) for attempt in attempts]
    return tuple(sorted(found, key=lambda attempt: attempt.changed, reverse=True))


def _dated(
    paths: RunPaths, attempt: Attempt, job: Job | None, signs: Mapping[str, float]
) -> Attempt:
    if isinstance(attempt.end, EndMarker):
        return attempt
    sign = signs.get(attempt.job_id, 0.0)
    if job is not None and not job.state.is_final:
        return replace(attempt, changed=max(attempt.changed, sign), is_told=False)
    told = told_end(
        None if job is None else job.end_time, attempt.changed if attempt.is_told else None
    )
    if told is not None:
        return replace(attempt, changed=told, is_told=True)
    last = max(sign, attempt.start or 0.0, last_sign_in(paths.attempt(attempt.job_id)))
    return replace(attempt, changed=last or attempt.changed)


T = TypeVar("T")


def _standing(card: RunCard) -> TrainerStanding | None:
    if not isinstance(card, ForeignCard):
        return None
    from tr11ops.trainers.levels import standing_of

    return standing_of(card.settings, card.world_size)


def standing_of_card(card: RunCard) -> TrainerStanding | None:
    """What tr11 does for a foreign trainer, with what a drill has proved as it is on record now; None for
    its own.
    """
    if not isinstance(card, ForeignCard):
        return None
    from tr11ops.trainers.levels import standing_now

    return standing_now(card.paths, card.settings, card.world_size)


def facts_of(card: RunCard, typed: str = "") -> RunFacts:
    """What watching needs of a run card. `typed` is the card as the person named it, for the
    commands shown.
    """
    return RunFacts(
        name=card.run.name,
        variant=card.run.variant,
        directory=card.paths.root,
        kill_switch=card.kill_switch,
        card=typed,
        nodes=card.slurm.nodes,
        total_iterations=card.total_iterations,
        checkpoint_interval=card.saves_every.steps,
        checkpoint_minutes=card.saves_every.minutes,
        log_interval=card.log_interval,
        watch=card.watch,
        resilience=card.resilience,
        recovery=card.recovery if isinstance(card, OwnCard) else RecoverySection(),
        partition=card.slurm.partition or "",
        allocated_nodes=card.slurm.allocated_nodes,
        least_nodes=card.slurm.least_nodes,
        backup=card.backup,
        hub=card.hub,
        alerts=card.alerts,
        filesystems=tuple(card.filesystems),
        need=card.resume_need,
        standing=_standing(card),
        source=card,
    )


def observe(
    directory: RunDirectory,
    facts: RunFacts,
    scheduler: Overview | Unknown,
    now: float | Moment,
    read_digests: bool = False,
    silence: str = "",
) -> Snapshot:
    """One snapshot of the run. `scheduler` is Unknown where none could be had (the reason goes into
    the snapshot).

    `now` is the moment by the run's clock (`look_now`); a number is taken for that. `read_digests`
    also compares the newest checkpoint's digests with its manifest, which reads all its bytes.
    `silence`: why the directory's file system does not answer; no file is read then.
    """
    if isinstance(now, Moment):
        moment = now
    else:
        moment = Moment(now)
    submissions, submission_errors = (
        (Unknown(silence), ()) if silence else files.read_submissions(directory)
    )
    jobs, nodes = _ask(
        scheduler, {facts.name, *(entry.run for entry in known(submissions, ()) if entry.run)}
    )
    name = scheduler.name if not isinstance(scheduler, Unknown) else ""
    unmounted = silence or why_unmounted(directory, jobs, moment.time)
    if unmounted or not directory.exists:
        lack = f"{directory.root} is not there: nothing launched from here, or its file system is not mounted"
        why = Unknown(unmounted or lack)
        mine, namesakes = _split(jobs, Ownership(directory))
        blind = unseen(facts, moment, why)
        switch = why if silence else files.read_kill_switch(facts.kill_switch) or why
        return replace(
            blind,
            scheduler=name,
            jobs=mine,
            nodes=nodes,
            namesakes=namesakes,
            kill_switch=switch,
            clock_ahead=moment.ahead,
            unmounted=unmounted,
            is_silent=bool(silence),
        )
    paths = directory.paths
    if isinstance(facts.source, ForeignCard):
        facts = replace(facts, standing=standing_of_card(facts.source))
    mine, namesakes = _split(jobs, Ownership(directory, known(submissions, ()), scheduler=name))
    namesakes, unclear = without_unclear(namesakes, submissions, submission_errors)
    heartbeats, heartbeat_errors = files.read_heartbeats(paths)
    if facts.is_watched:
        namesakes = ()  # the name is its owner's, who may give it to any number of jobs
        mine, heartbeats = _of_watched(facts, paths, mine, heartbeats, moment.time)
    attempts = files.read_attempts(paths)
    steps = files.read_steps(paths)
    switch_fault = place_fault(directory)
    held = tuple(job for job in known(mine, ()) if job.state is JobState.PENDING and is_held(job))
    # who holds it, may be old
    all_attempts = None
    if held:
        all_attempts = known(observed(directory.attempt_ids), [])[::-1]
    operation = see_operation(
        directory,
        facts,
        heartbeats=heartbeats,
        attempts=attempts,
        attempts_of_holds=all_attempts,
        queued=held,
    )
    if not isinstance(attempts, Unknown):
        ended_jobs = known(operation.ended_jobs, ())
        attempts = dated(
            paths,
            attempts,
            jobs=known(mine, ()),
            ended_jobs=ended_jobs,
            beats=known(heartbeats, ()),
            steps=known(steps, ()),
        )
    ahead = skews(known(operation.clocks, ()), facts.watch.clock_skew_seconds)
    living = frozenset(job.raw_id for job in known(mine, ()) if job.state.is_active)
    beats = known(heartbeats, ())
    training = see_training(paths, attempts, facts.evaluates)
    return Snapshot(
        time=moment.time,
        run=_as_launched(directory, facts, known(mine, ()), known(attempts, ())),
        scheduler=name,
        jobs=mine,
        nodes=nodes,
        steps=steps if isinstance(steps, Unknown) else corrected_steps(steps, beats, ahead, living),
        heartbeats=heartbeats
        if isinstance(heartbeats, Unknown)
        else corrected_beats(beats, ahead, living),
        attempts=attempts
        if isinstance(attempts, Unknown)
        else corrected_attempts(attempts, ahead, living),
        checkpoints=files.read_checkpoints(paths.checkpoints, read_digests, facts.need),
        kill_switch=Unknown(switch_fault)
        if switch_fault
        else files.read_kill_switch(facts.kill_switch),
        switch_fault=switch_fault,
        pause=files.read_kill_switch(paths.pause),
        exclusions=_exclusions(
            files.read_exclusions(directory.exclusions),
            known(mine, ()),
            known(submissions, ()),
            scheduler,
        ),
        submissions=submissions,
        namesakes=namesakes,
        read_errors=(*heartbeat_errors, *submission_errors, *([unclear] if unclear else ())),
        origin=observed(BranchOrigin.read, paths),
        damaged_files=observed(find_damage, directory),
        readmissions=read_readmissions(
            directory, training.launch_ends, moment.time, training.compute_before
        ),
        resubmitted=_resubmitted(directory, moment.time) if facts.watch.resubmissions else 0,
        clock_ahead=moment.ahead,
        training=training,
        operation=operation,
    )


def _of_watched(
    facts: RunFacts,
    paths: RunPaths,
    jobs: Observed[tuple[Job, ...]],
    beats: Observed[tuple[Heartbeat, ...]],
    now: float,
) -> tuple[Observed[tuple[Job, ...]], Observed[tuple[Heartbeat, ...]]]:
    """The one job that is watched, and not the other tasks of its array; and its heartbeats, which are
    unknown where its log was not heard of late.
    """
    from tr11ops.trainers.watched import WatchedJob, why_unheard  # of no use to most runs

    watched = observed(WatchedJob.read, paths)
    if isinstance(watched, Unknown):
        return jobs, watched
    if watched is None:
        return jobs, beats
    if not isinstance(jobs, Unknown):
        jobs = tuple(job for job in jobs if watched.job_id in (job.job_id, job.raw_id))
    why = why_unheard(watched, 60.0 * facts.alerts.interval_minutes, now)
    return jobs, Unknown(why) if why else beats


def _as_launched(
    directory: RunDirectory, facts: RunFacts, jobs: Sequence[Job], attempts: Sequence[Attempt]
) -> RunFacts:
    """The facts with what the running attempt, and the jobs, go by: that is not what stands in the
    card since they were launched.
    """
    newest, own, launched = newest_attempt(attempts), {}, _launched(directory, jobs)
    if launched:
        facts = replace(facts, launched=launched)
    if newest is not None and any(
        job.raw_id == newest.job_id for job in jobs if job.state.is_active
    ):
        own = files.read_details(directory.paths.attempt(newest.job_id) / "card.json")
    if not own:
        return facts  # it cannot be read, or is being written: the present card is the best guess
    interval, nodes = _amount(own, "checkpoint", "interval"), _amount(own, "slurm", "nodes")
    minutes = _amount(own, "checkpoint", "interval_minutes")
    launch = None
    if newest is not None:
        launch = known(observed(LaunchRecord.newest, directory.paths.attempt(newest.job_id)), None)
    if launch is not None and launch.save_minutes is not None:
        minutes = launch.save_minutes
    return replace(
        facts,
        trains_on=None if nodes is None else int(nodes),
        checkpoint_interval=facts.checkpoint_interval if interval is None else int(interval),
        checkpoint_minutes=minutes,
        log_interval=int(_amount(own, "logging", "interval") or facts.log_interval),
    )


def _launched(directory: RunDirectory, jobs: Iterable[Job]) -> Mapping[str, ExitPlan]:
    """When these jobs leave by their own cards (see RunFacts); without those that cannot be read."""
    found: dict[str, ExitPlan | None] = {}
    for job in jobs:
        mark = parse_comment(job.comment)
        if mark is not None and mark[0] not in found and not job.state.is_final:
            found[mark[0]] = _exit_plan_of(directory.submission(mark[0]).card)
        if job.state.is_active:
            found[job.raw_id] = _as_told(directory.paths, job)
    return {name: plan for name, plan in found.items() if plan is not None}


def _exit_plan_of(card: Path) -> ExitPlan | None:
    """When an attempt leaves by a card as it was written for it; None where it cannot be read."""
    from tr11ops.runcard.exit_duration import resolved_exit_plan

    return resolved_exit_plan(files.read_details(card))


def _as_told(paths: RunPaths, job: Job) -> ExitPlan | None:
    """When a running attempt leaves: as its agent has told the trainer, else by its own card."""
    plan = _exit_plan_of(paths.attempt(job.raw_id) / "card.json")
    told = known(observed(ExitTime.read, paths.exit_time(job.raw_id)), None)
    if plan is None or told is None or told.time is None or job.start_time is None:
        return plan
    return replace(plan, minutes=max(0.0, told.time - job.start_time) / 60, why="")


def _amount(card: Mapping[str, Any], table: str, key: str) -> float | None:
    """A number above zero in a card as it was written for the trainer; None where there is none."""
    keys = card.get(table)
    value = None
    if isinstance(keys, dict):
        value = keys.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if 0 < value < math.inf:
        return value
    return None


def unseen(facts: RunFacts, moment: Moment, why: Unknown) -> Snapshot:
    """A snapshot in which nothing was seen, for one reason. No file is read."""
    return Snapshot(
        time=moment.time,
        run=facts,
        scheduler="",
        training=TrainingObservations(**all_unknown(TrainingObservations, why)),
        operation=OperationObservations(**all_unknown(OperationObservations, why)),
        **all_unknown(Snapshot, why),
    )


def observe_node_speeds(directory: RunDirectory, facts: RunFacts, now: float) -> Snapshot:
    """Which node was slow, and what became of it since, by the run's records; the rest is unknown."""
    paths, blind = directory.paths, unseen(facts, Moment(now), Unknown("it is not looked at"))
    attempts = files.read_attempts(paths)
    measured = last_measured(paths, known(attempts, ()))
    return replace(
        blind,
        attempts=attempts,
        steps=files.read_steps(paths),
        exclusions=files.read_exclusions(directory.exclusions),
        readmissions=read_readmissions(directory, (), now, measured),
        training=replace(blind.training, compute_before=measured),
    )


def look_now(directory: RunDirectory, facts: RunFacts, scheduler: Overview | Unknown) -> Moment:
    """The moment for `observe`, by the run's clock."""
    return moment_of(directory, facts.watch.clock_skew_seconds, scheduler)


def read_readmissions(
    directory: RunDirectory,
    launch_ends: Observed[tuple[LaunchEnd, ...]],
    now: float,
    measured: Observed[tuple[ComputeTimes, ...]] = (),
) -> Observed[tuple[Readmission, ...]]:
    """The nodes that were taken off the list, or measured to be quick enough, in a day, or since the
    oldest of the launches that blame one, or since an attempt `measured` its nodes.
    """
    blaming = [end.time for end in known(launch_ends, ()) if end.blamed]
    blaming += [times.time for times in known(measured, ())]
    ledger = read_journal(directory.journal, since=min([now - DAY_SECONDS, *blaming]))
    unread = next((fault for fault in ledger.faults if fault.kind == "unreadable"), None)
    if unread is not None:
        return Unknown(str(unread))
    return tuple(
        Readmission(str(entry.data.get("node", "")), entry.time, entry.kind == CHECKED)
        for entry in ledger.entries
        if entry.kind == INCLUDED or is_clean_speed(entry)
    )


def _resubmitted(directory: RunDirectory, now: float) -> Observed[int]:
    """How much of a day's budget the watchdog has spent; it does nothing where the journal may not
    tell all.
    """
    past = replay(read_journal(directory.journal, since=now - DAY_SECONDS))
    if past.read_error:
        return Unknown(past.read_error)
    return past.spent("resubmit", now)


def _ask(
    scheduler: Overview | Unknown, names: Collection[str]
) -> tuple[Observed[tuple[Job, ...]], Observed[tuple[Node, ...]]]:
    """Jobs, each with a reason that its partitions bear out, and nodes: two calls, or one when the
    first gets no answer (each failing call costs its whole time-out).

    A run that was launched under several names is found among all jobs.
    """
    if isinstance(scheduler, Unknown):
        return scheduler, scheduler
    name = None
    if len(names) == 1:
        name = next(iter(names))
    jobs = _call(lambda: scheduler.jobs(name=name))
    if isinstance(jobs, Unknown):
        return jobs, Unknown(jobs.why)
    nodes = _call(scheduler.nodes)
    return with_reasons_of_now(jobs, known(nodes, ())), nodes


def _call(call: Callable[[], T]) -> Observed[T]:
    try:
        return call()
    except SchedulerUnreachable as error:
        return Unknown(cause(error))
    except (SchedulerError, OSError, ValueError) as error:
        return Unknown(f"it answered with an error: {cause(error)}")


def _split(
    jobs: Observed[tuple[Job, ...]], ownership: Ownership
) -> tuple[Observed[tuple[Job, ...]], tuple[Job, ...]]:
    if isinstance(jobs, Unknown):
        return (jobs, ())
    return ownership.split(jobs)


def _exclusions(
    listed: Observed[tuple[Exclusion, ...]],
    jobs: tuple[Job, ...],
    submissions: tuple[Submission, ...],
    scheduler: Overview | Unknown,
) -> Observed[tuple[Exclusion, ...]]:
    """The run's own list, and the nodes that its queued or running jobs exclude for other reasons.

    Where the scheduler's table does not tell what a job excludes, and it was submitted with a node
    that is not on the list, the scheduler is asked of that job: the node may have been let in since.
    """
    if isinstance(listed, Unknown):
        return listed
    found = {entry.node: entry for entry in listed}
    submitted = {entry.job_id: entry.excluded for entry in submissions if entry.excluded}
    for job in jobs:
        if job.state is not JobState.PENDING and not job.state.is_active:
            continue
        excluded = job.excluded or submitted.get(array_number(job), ())
        if not job.excluded and not found.keys() >= {*excluded}:
            excluded = _excluded_now(job, excluded, scheduler)
        for node in excluded:
            found.setdefault(node, Exclusion(node, why=f"excluded by job {job.job_id}"))
    return tuple(found[name] for name in sorted(found))


def _excluded_now(
    job: Job, submitted: tuple[str, ...], scheduler: Overview | Unknown
) -> tuple[str, ...]:
    """What the scheduler excludes from a job; what it was `submitted` with where it does not say."""
    if isinstance(scheduler, Unknown):
        return submitted
    record = known(_call(lambda: scheduler.job(job.job_id)), None)
    if record is None:
        return submitted
    return record.excluded

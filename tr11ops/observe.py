"""Looks once at a run: scheduler and run directory become one Snapshot. At most two calls to the scheduler.

Nothing here raises for what could not be seen: that is `Unknown`, with its reason, in the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tr11ops import evidence
from tr11ops.cluster.base import Job, JobState, Node, Overview, SchedulerError, SchedulerUnreachable
from tr11ops.deeds import DAY_SECONDS, replay
from tr11ops.evidence_operation import operation_facts, see_operation, unseen_operation
from tr11ops.evidence_training import see_training, training_facts, unseen_training
from tr11ops.journal import read_journal
from tr11ops.rundir import RunDirectory, Submission, parse_comment
from tr11ops.snapshot import Exclusion, Observed, RunFacts, Snapshot, Unknown, known
from trainer.checkpoint.resumable import ResumeNeed

if TYPE_CHECKING:
    from tr11ops.runcard import RunCard

T = TypeVar("T")


def facts_of(card: RunCard, typed: str = "") -> RunFacts:
    """What watching needs of a run card. `typed` is the card as the person named it, for the commands shown."""
    from tr11ops.exit_duration import exit_plan

    minutes = exit_plan(card).minutes
    return RunFacts(
        name=card.run.name,
        variant=card.run.variant,
        directory=card.paths.root,
        kill_switch=card.kill_switch,
        card=typed,
        nodes=card.slurm.nodes,
        total_iterations=card.total_iterations,
        checkpoint_interval=card.checkpoint.interval,
        task_seconds=60.0 * minutes if minutes is not None else float(card.time_limit_seconds),
        training=training_facts(card),
        operation=operation_facts(card, Path(typed).parent),
        need=ResumeNeed.of(card),
    )


def observe(
    directory: RunDirectory, facts: RunFacts, scheduler: Overview | Unknown, now: float, read_digests: bool = False
) -> Snapshot:
    """One snapshot of the run. `scheduler` is Unknown where none could be had (the reason goes into the snapshot).

    `now` is the moment, in seconds since the epoch. `read_digests` also compares the newest checkpoint's digests with
    its manifest, which reads all its bytes.
    """
    jobs, nodes = _ask(scheduler, facts.name)
    name = scheduler.name if not isinstance(scheduler, Unknown) else ""
    if not directory.exists:
        why = Unknown(f"{directory.root} is not there: nothing launched from here, or its file system is not mounted")
        mine, namesakes = _split(jobs, directory, facts.variant, ())
        return Snapshot(
            time=now,
            run=facts,
            scheduler=name,
            jobs=mine,
            nodes=nodes,
            steps=why,
            heartbeats=why,
            attempts=why,
            checkpoints=why,
            kill_switch=evidence.read_kill_switch(facts.kill_switch) or why,
            exclusions=why,
            submissions=why,
            namesakes=namesakes,
            resubmitted=why,
            **vars(unseen_training(why)),
            **vars(unseen_operation(why)),
        )
    paths = directory.paths
    submissions, submission_doubts = evidence.read_submissions(directory)
    mine, namesakes = _split(jobs, directory, facts.variant, known(submissions, ()))
    heartbeats, heartbeat_doubts = evidence.read_heartbeats(paths)
    attempts = evidence.read_attempts(paths)
    operation = see_operation(directory, facts.operation, facts.name, heartbeats, attempts)
    return Snapshot(
        time=now,
        run=facts,
        scheduler=name,
        jobs=mine,
        nodes=nodes,
        steps=evidence.read_steps(paths),
        heartbeats=heartbeats,
        attempts=attempts,
        checkpoints=evidence.read_checkpoints(paths.checkpoints, read_digests, facts.need),
        kill_switch=evidence.read_kill_switch(facts.kill_switch),
        pause=evidence.read_kill_switch(paths.pause),
        exclusions=_exclusions(evidence.read_exclusions(directory.exclusions), known(mine, ()), known(submissions, ())),
        submissions=submissions,
        namesakes=namesakes,
        doubts=(*heartbeat_doubts, *submission_doubts),
        resubmitted=_resubmitted(directory, now) if facts.operation.resubmissions else 0,
        **vars(see_training(paths, attempts)),
        **vars(operation),
    )


def _resubmitted(directory: RunDirectory, now: float) -> Observed[int]:
    """How much of a day's budget the watchdog has spent; it does nothing where the journal may not tell all."""
    past = replay(read_journal(directory.journal, since=now - DAY_SECONDS))
    return Unknown(past.doubt) if past.doubt else past.spent("resubmit", now)


def _ask(scheduler: Overview | Unknown, name: str) -> tuple[Observed[tuple[Job, ...]], Observed[tuple[Node, ...]]]:
    """Jobs and nodes: two calls, or one when the first gets no answer (each failing call costs its whole time-out)."""
    if isinstance(scheduler, Unknown):
        return scheduler, scheduler
    jobs = _call(lambda: scheduler.jobs(name=name))
    if isinstance(jobs, Unknown):
        return jobs, Unknown(jobs.why)
    return jobs, _call(scheduler.nodes)


def _call(call: Callable[[], T]) -> Observed[T]:
    try:
        return call()
    except SchedulerUnreachable as error:
        return Unknown(evidence.cause(error))
    except (SchedulerError, OSError, ValueError) as error:
        return Unknown(f"it answered with an error: {evidence.cause(error)}")


def _split(
    jobs: Observed[tuple[Job, ...]], directory: RunDirectory, variant: str, submissions: tuple[Submission, ...]
) -> tuple[Observed[tuple[Job, ...]], tuple[Job, ...]]:
    if isinstance(jobs, Unknown):
        return jobs, ()
    whose = _Ownership(directory.mark, variant, submissions)
    mine = tuple(job for job in jobs if whose.has(job))
    kept = frozenset(map(id, mine))
    return mine, tuple(job for job in jobs if id(job) not in kept)


def belongs(job: Job, directory: RunDirectory, variant: str, submissions: tuple[Submission, ...]) -> bool:
    """Whether a job of the right name is of this very run: by the mark in its comment, else by a recorded job id.

    Another user's, another directory's or another variant's job of the same name is not. Ids alone are trusted only
    for a job submitted no earlier than the record was begun, because schedulers reuse ids after a reset.
    """
    return _Ownership(directory.mark, variant, submissions).has(job)


class _Ownership:
    """`belongs` for thousands of jobs: what it needs of the submissions is looked up, not searched."""

    def __init__(self, mark: str, variant: str, submissions: tuple[Submission, ...]) -> None:
        self._mark = mark
        self._variant = variant
        self._variants = {entry.tag: entry.variant for entry in submissions}
        self._marked: dict[str, bool | None] = {}
        self._by_job: dict[str, Submission] = {}
        for entry in submissions:
            if entry.job_id is not None and entry.variant == variant:
                self._by_job.setdefault(entry.job_id, entry)

    def has(self, job: Job) -> bool:
        if job.comment not in self._marked:  # the same for all tasks of an array
            marked = parse_comment(job.comment)
            self._marked[job.comment] = None if marked is None else self._is_ours(*marked)
        is_ours = self._marked[job.comment]
        if is_ours is not None:
            return is_ours
        entry = self._by_job.get(job.raw_id) or self._by_job.get(job.array_id or job.raw_id)
        return entry is not None and (job.submit_time is None or job.submit_time >= entry.time - 60.0)

    def _is_ours(self, tag: str, mark: str) -> bool:
        return mark == self._mark and self._variants.get(tag, self._variant) == self._variant


def _exclusions(
    listed: Observed[tuple[Exclusion, ...]], jobs: tuple[Job, ...], submissions: tuple[Submission, ...]
) -> Observed[tuple[Exclusion, ...]]:
    """The run's own list, and the nodes that its queued or running jobs exclude for other reasons.

    Where the scheduler's answer does not tell what a job excludes, its submission does.
    """
    if isinstance(listed, Unknown):
        return listed
    found = {entry.node: entry for entry in listed}
    submitted = {entry.job_id: entry.excluded for entry in submissions if entry.excluded}
    for job in jobs:
        if job.state is JobState.PENDING or job.state.is_active:
            for node in job.excluded or submitted.get(job.array_id or job.raw_id, ()):
                found.setdefault(node, Exclusion(node, why=f"excluded by job {job.job_id}"))
    return tuple(found[name] for name in sorted(found))

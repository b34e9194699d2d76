"""Carries out the watchdog's plan: every effect between an intent and an outcome in the journal.

The intent is on disk before the effect, the outcome after it, so a process that is killed at any
point leaves either no trace and no effect, or an intent that the next pass settles by looking: a
submission is found by its tag, and all else may be done twice without harm. A submission is at most
one job that trains, whatever is killed when: see tr11ops/launch/submit.py and
tr11ops/launch/successor.py.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.base.errors import NotDone, SchedulerError, SchedulerUnreachable, Uncertain
from tr11ops.base.observed import Unknown, cause, known, observed
from tr11ops.cluster.arrays import covers
from tr11ops.cluster.base import Job, JobState, Scheduler
from tr11ops.cluster.pending_reasons import is_held as job_is_held
from tr11ops.nodes.queue_exclusions import ExclusionResult, RunQueue, exclude_nodes, include_nodes
from tr11ops.observe.jobs import own_jobs_now
from tr11ops.observe.snapshot import Snapshot
from tr11ops.queue.held_jobs import hold, release
from tr11ops.rundir.action_log import (
    INTENT,
    OUTCOME,
    ActionRecord,
    ProgressRecord,
    Result,
    intent_data,
    outcome_data,
)
from tr11ops.rundir.exclusion import Exclusion, kept_off
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory, is_superseded, job_of_tag, new_tag, read_traces
from tr11ops.watchdog.actions import (
    Action,
    Cancel,
    Exclude,
    Hold,
    Include,
    Plan,
    Release,
    Resubmit,
    Stacks,
)
from tr11ops.watchdog.stacks import keep_stacks
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.launch.session import LaunchJob
    from tr11ops.runcard.card import RunCard


class Done(Record):
    """What became of one action of the plan."""

    action: Action
    result: Result
    message: str

    def words(self) -> str:
        """One line for the log."""
        mark = {Result.REFUSED: "NOT done: ", Result.UNKNOWN: "UNKNOWN: "}.get(self.result, "")
        return f"{self.action.words()}; {mark}{self.message}"


def carry_out(
    actions: Iterable[Action],
    effect: Callable[[Action, str], str],
    journal: Journal,
    *,
    stopped: Callable[[], str],
    progress: ProgressRecord,
    now: float,
) -> tuple[Done, ...]:
    """Do the actions in their order, until `stopped` says why not to go on: it is asked before each
    effect.

    `effect` does one, with the tag that names a submission, and returns what was done; it raises
    NotDone or Uncertain. An intent that cannot be written stops everything before its effect.
    """
    done: list[Done] = []
    for action in actions:
        needed, owes = "", 0
        if isinstance(action, Cancel):
            needed, owes = action.only_after, action.owes
        if needed and not any(
            one.action.incident == needed and one.result is Result.DONE for one in done
        ):
            done.append(Done(action, Result.REFUSED, "what must come before it was not done"))
            continue
        tag = ""
        if isinstance(action, Resubmit):
            tag = new_tag(now)
        number = secrets.token_hex(6)
        action_record = ActionRecord(
            number,
            action.name,
            subject=action.subject,
            incident=action.incident,
            time=now,
            tag=tag,
            progress=progress,
            owes=owes,
        )
        try:
            why = stopped()
            if why:
                done.append(Done(action, Result.REFUSED, why))
                break
            journal.write(
                INTENT,
                action.why,
                {**intent_data(action_record), "evidence": list(action.evidence)},
                AUTOMATIC_OWNER,
                now,
            )
        except OSError as error:
            done.append(
                Done(action, Result.REFUSED, f"the run directory cannot be written: {cause(error)}")
            )
            break
        result, message = _tried(effect, action, tag)
        try:
            journal.write(
                OUTCOME, message, outcome_data(action_record, result, message), AUTOMATIC_OWNER
            )
        except OSError as error:
            message = f"{message} (not in the journal: {cause(error)})"
        done.append(Done(action, result, message))
    return tuple(done)


def _tried(effect: Callable[[Action, str], str], action: Action, tag: str) -> tuple[Result, str]:
    try:
        return Result.DONE, effect(action, tag)
    except NotDone as error:
        return Result.REFUSED, str(error)
    except Uncertain as error:
        return Result.UNKNOWN, str(error)


# ----------------------------------------------------------------------------- what a killed
# process left
def settle(
    unfinished: Sequence[ActionRecord],
    snapshot: Snapshot,
    directory: RunDirectory,
    journal: Journal,
) -> tuple[ActionRecord, ...]:
    """Write the outcome of every action whose end can be seen; returns those that were settled.
    Raises OSError.
    """
    settled = []
    for action_record in unfinished:
        result, message, job_id = _what_became(action_record, snapshot, directory)
        if result is Result.OPEN:
            continue
        if job_id:
            _number_the_record(action_record.tag, job_id, snapshot, directory)
        journal.write(
            OUTCOME, message, outcome_data(action_record, result, message), AUTOMATIC_OWNER
        )
        settled.append(replace(action_record, result=result, message=message))
    return tuple(settled)


OPEN = (Result.OPEN, "", "")  # it cannot be seen yet


def _what_became(
    action_record: ActionRecord, snapshot: Snapshot, directory: RunDirectory
) -> tuple[Result, str, str]:
    """(result, in words, number of a job found by its tag)."""
    if isinstance(snapshot.jobs, Unknown) or isinstance(snapshot.exclusions, Unknown):
        return OPEN
    if action_record.action == "resubmit":
        return _of_submission(action_record, snapshot, snapshot.jobs, directory)
    jobs = [
        job
        for job in snapshot.jobs
        if action_record.subject in {job.raw_id, job.job_id} or covers(action_record.subject, job)
    ]
    living = [job for job in jobs if not job.state.is_final]
    waiting = [job for job in living if job.state is JobState.PENDING]
    is_held = any(job_is_held(job) for job in waiting)
    is_listed = any(entry.node == action_record.subject for entry in snapshot.exclusions)
    # stacks:JOB, or stacks-again:JOB:TIME
    asked = action_record.incident.partition(":")[2].partition(":")[0]
    is_kept = any(kept.job_id == asked for kept in known(snapshot.training.stacks, ()))
    seen = {
        "stacks": (is_kept, "they are kept", "there are none"),
        "exclude": (is_listed, "it is excluded", "it is not on the list"),
        "include": (not is_listed, "it may be used again", "it is still on the list"),
        "cancel": (not living, "it is gone", "it is still there"),
        "hold": (is_held or not waiting, "it is held", "it is not held"),
        "release": (not is_held, "it is released", "it is still held"),
    }.get(
        action_record.action,
        (False, "", f"{action_record.action!r} is not an action of this version"),
    )
    if seen[0]:
        return Result.DONE, f"seen later: {seen[1]}", ""
    return Result.REFUSED, f"seen later: {seen[2]}", ""


def _of_submission(
    action_record: ActionRecord, snapshot: Snapshot, jobs: tuple[Job, ...], directory: RunDirectory
) -> tuple[Result, str, str]:
    """A submission leaves its record before it is sent. One that has no job is given up by the next
    launch.
    """
    if isinstance(snapshot.submissions, Unknown):
        return OPEN
    record = next((entry for entry in snapshot.submissions if entry.tag == action_record.tag), None)
    if record is None:
        return Result.REFUSED, "seen later: it was never sent", ""
    if is_superseded(record):
        return Result.REFUSED, "seen later: it was given up for another submission", ""
    if record.job_id is not None:
        return Result.DONE, f"seen later: job {record.job_id}", ""
    traces = observed(lambda: read_traces(directory, (record,)))
    if isinstance(traces, Unknown):
        return OPEN
    number = job_of_tag(action_record.tag, jobs, traces)
    if number is not None:
        return Result.DONE, f"seen later: job {number}", number
    return (
        Result.REFUSED,
        "seen later: no job carries its tag; should one come, it leaves at once",
        "",
    )


def _number_the_record(tag: str, job_id: str, snapshot: Snapshot, directory: RunDirectory) -> None:
    record = next(entry for entry in known(snapshot.submissions, ()) if entry.tag == tag)
    directory.write_submission(replace(record, job_id=job_id, note=""))


# ----------------------------------------------------------------------------- the effects
# themselves
def exclude_as_planned(
    action: Exclude, directory: RunDirectory, queue: RunQueue, days: float | None
) -> str:
    """Exclude the node that the policy names, for so many days; what was done. Raises NotDone where it
    is refused.
    """
    asked = Exclusion(
        action.subject,
        action.why,
        owner=AUTOMATIC_OWNER,
        evidence=action.evidence,
        job_id=action.job_id,
        state=action.state.value,
        fault=action.fault,
    )
    done = exclude_nodes(directory, [asked], queue, days=days, limit=action.limit)
    return _words_of(kept_off(action.state), done)


def include_as_planned(action: Include, directory: RunDirectory, queue: RunQueue) -> str:
    """Let the run use the node that the policy names again, after the others; what was done. Raises
    NotDone where it is refused.
    """
    done = include_nodes(
        directory,
        [action.subject],
        queue,
        why=action.why,
        owner=AUTOMATIC_OWNER,
        then=action.then,
    )
    return _words_of("may be used again", done)


def _words_of(what: str, done: ExclusionResult) -> str:
    if done.refused:
        raise NotDone(done.refused[0][1])
    return "; ".join((what, *done.failures))


class RunEffects(Record):
    """The real world of one run. `prepare` makes a launch of an array, to be queued behind a job or
    at once.

    `now` is the moment of the look, by the run's clock.
    """

    directory: RunDirectory
    scheduler: Scheduler
    prepare: Callable[[str, str | None], LaunchJob]
    card: RunCard
    user: str
    nodes: frozenset[str]
    now: float

    def carry_out(self, action: Action, tag: str) -> str:
        """Do it; returns what was done. Raises NotDone or Uncertain. `tag` names a submission."""
        try:
            if isinstance(action, Resubmit):
                return self._resubmit(action, tag)
            if isinstance(action, Exclude):
                days = self.card.resilience.exclusion_days
                return exclude_as_planned(action, self.directory, self._queue(), days)
            if isinstance(action, Include):
                return include_as_planned(action, self.directory, self._queue())
            if isinstance(action, Cancel):
                self._prove_relaunch(action.relaunch)
                self.scheduler.cancel(action.subject)
                return "cancelled"
            if isinstance(action, Stacks):
                return self._keep_stacks(action)
            return self._hold_or_release(action)
        except SchedulerUnreachable as error:
            raise Uncertain(cause(error)) from None
        except (SchedulerError, OSError, ValueError) as error:
            raise NotDone(cause(error)) from None

    def refusal(self, action: Action) -> str:
        """Why a launch, or a cancellation for the sake of one, would be refused now; "" where it
        would not. Changes nothing.
        """
        try:
            if isinstance(action, Cancel):
                self._prove_relaunch(action.relaunch)
            elif isinstance(action, Resubmit):
                self._prove(self.prepare(action.subject, action.after))
        except (NotDone, SchedulerError, OSError, ValueError) as error:
            return cause(error)
        return ""

    def _prove(self, job: LaunchJob) -> None:
        """Raises NotDone with what refuses a launch."""
        from tr11ops.launch.session import check_launch

        view = check_launch(job)
        if view.exit_code:
            raise NotDone("; ".join(str(check) for check in view.faults))

    def _prove_relaunch(self, relaunch: Resubmit | None) -> None:
        """A queue is not emptied for a launch that would be refused. Raises NotDone with what
        refuses it.
        """
        if relaunch is None:
            return
        job = self.prepare(relaunch.subject, relaunch.after)
        try:
            self._prove(replace(job, request=replace(job.request, replaces=relaunch.replaces)))
        except NotDone as error:
            raise NotDone(f"the launch that would take its place is refused: {error}") from None

    def _resubmit(self, action: Resubmit, tag: str) -> str:
        from tr11ops.launch.session import carry_out, check_launch

        job = self.prepare(action.subject, action.after)
        view = check_launch(job, tag)
        if not view.exit_code:
            view, records = carry_out(job, view, f"watchdog: {action.why}")
            if records:
                return f"submitted as job {', '.join(str(record.job_id) for record in records)}"
        raise NotDone("; ".join(str(check) for check in view.faults) or "the launch was refused")

    def _keep_stacks(self, action: Stacks) -> str:
        is_local = self.scheduler.name != "slurm"
        return keep_stacks(
            self.directory.paths,
            action.attempt,
            nodes=action.nodes,
            node_count=action.node_count,
            environment=os.environ,
            now=self.now,
            is_local=is_local,
        )

    def _queue(self) -> RunQueue:
        return RunQueue(
            self.scheduler,
            partial(own_jobs_now, self.directory, self.scheduler),
            lambda: self.nodes,
            kept=self.card.slurm.excluded_nodes,
            user=self.user,
        )

    def _hold_or_release(self, action: Action) -> str:
        numbers = [action.subject]
        if isinstance(action, Hold):
            result = hold(
                self.directory,
                numbers,
                scheduler=self.scheduler,
                who=AUTOMATIC_OWNER,
                why=action.why,
            )
        elif isinstance(action, Release):
            result = release(self.directory, numbers, self.scheduler)
        else:
            raise NotDone(f"{action.name} is not an action that can be carried out")
        if result.unanswered:
            raise Uncertain("; ".join(why for _, why in result.refused))
        if result.refused:
            raise NotDone("; ".join(why for _, why in result.refused))
        if isinstance(action, Hold):
            return "held"
        return "released"


def as_it_would_go(intended: Plan, effects: RunEffects) -> Plan:
    """What people are told of a plan before it is carried out: the launches that would be refused
    are withheld.

    A launch behind cancellations cannot be tried before these.
    """
    actions, withheld = list[Action](), list(intended.withheld)
    for action in intended.actions:
        is_behind = isinstance(action, Resubmit) and any(
            isinstance(one, Cancel) for one in intended.actions
        )
        if is_behind:
            against = ""
        else:
            against = effects.refusal(action)
        if against:
            withheld.append(f"{action.words()}; not done: {against}")
        else:
            actions.append(action)
    return Plan(tuple(actions), tuple(withheld))

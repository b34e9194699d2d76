"""The watchdog of a replay: what production would see of the run at a moment, what its detectors,
policy and alerts make of it, and the people who read the mails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from tr11ops.alerts.notify import tell
from tr11ops.alerts.policy import Policy, policy_of
from tr11ops.alerts.service import AlertInput
from tr11ops.alerts.state import AlertState, Message
from tr11ops.base.errors import NotDone
from tr11ops.base.observed import Observed, known
from tr11ops.cluster.arrays import names_of
from tr11ops.detect.registry import detect_all, unjudged_detectors
from tr11ops.nodes.queue_exclusions import RunQueue, include_nodes
from tr11ops.observe.files import read_attempts, read_exclusions
from tr11ops.observe.look import facts_of, read_readmissions
from tr11ops.observe.observations import (
    LaunchEnd,
    OperationObservations,
    Readmission,
    TrainingObservations,
)
from tr11ops.observe.snapshot import Attempt, Checkpoint, Checkpoints, Snapshot, Step
from tr11ops.observe.training_files import read_launch_ends, read_stacks
from tr11ops.queue.queued_jobs import PendingJobs
from tr11ops.replay.evidence import GPUS, leave_stacks
from tr11ops.replay.run import SimulatedRun
from tr11ops.replay.scheduler import USER
from tr11ops.rundir.action_log import ActionHistory, ActionRecord, ProgressRecord
from tr11ops.rundir.attempts import KeptStacks
from tr11ops.rundir.cron_records import PeriodicJobState
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.exclusions import due_for_recheck, read_version
from tr11ops.rundir.hold_store import HoldRecord, forget_holds, read_holds
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory, Submission
from tr11ops.watchdog.actions import (
    Action,
    Cancel,
    Exclude,
    Hold,
    Include,
    Plan,
    PolicyContext,
    Release,
    Resubmit,
)
from tr11ops.watchdog.apply import carry_out, exclude_as_planned, include_as_planned
from tr11ops.watchdog.context import read_policy_context
from tr11ops.watchdog.policy import plan
from tr11ops.watchdog.repairs import note_out_of_service, out_of_service
from tr11ops.watchdog.rules import progress
from tr11ops.watchdog.situation import situation_of
from tr11ops.watchdog.stacks import hanging_jobs
from tr11ops.watchdog.verdict import judge
from trainer.contract.attempt import Heartbeat
from trainer.contract.metrics_record import MeasuredStep
from trainer.contract.record import Record

STEPS_SEEN = 400  # as production reads of a log
RANKS_SEEN = 8
ATTEMPTS_SEEN = 3
CHAIN_END = "chain-end"
MORE_TASKS = 10  # that a person submits then
ARRAY_TASKS = 3  # of `watch.resubmit_array`


class RunRecords(Record):
    """What the run directory says; read again only where something has happened since."""

    attempts: tuple[Attempt, ...]
    launch_ends: tuple[LaunchEnd, ...]
    exclusions: Observed[tuple[Exclusion, ...]]
    readmissions: Observed[tuple[Readmission, ...]]
    submissions: tuple[Submission, ...]
    holds: tuple[HoldRecord, ...]
    context: PolicyContext

    @classmethod
    def read(cls, directory: RunDirectory, now: float) -> RunRecords:
        attempts = known(read_attempts(directory.paths), ())
        ends = tuple(
            end
            for attempt in attempts[:ATTEMPTS_SEEN]
            for end in known(read_launch_ends(directory.paths, attempt.job_id), ())
        )
        return cls(
            attempts,
            ends,
            readmissions=read_readmissions(directory, ends, now),
            exclusions=read_exclusions(directory.exclusions),
            submissions=tuple(directory.read_submissions()),
            holds=read_holds(directory),
            context=read_policy_context(directory, USER, now),
        )


class Watchdog:
    """Looks at a production run as often as its card says, and acts as far as that lets it. While it
    trains and nothing has happened for two looks, the next ones would see the same: these are further
    apart (`Parameters.quiet_looks`).
    """

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self._world = run.world
        self._facts = facts_of(run.card)
        self._policy: Policy = policy_of(run.card, mark="replay", host="login")
        self._alerts = AlertState()
        self._history: tuple[ActionRecord, ...] = ()
        self._person_comes = math.inf
        self._next_look = self._world.now + self._world.parameters.looks
        self._seen: tuple[object, ...] = ()
        self._records: RunRecords | None = None
        self._alike = 0  # looks in a row to which nothing had happened
        self.messages: list[Message] = []

    @property
    def next_wake(self) -> float:
        """When the next look is due, or a person comes."""
        return min(self._next_look, self._person_comes)

    def wake(self) -> None:
        """Look, or be the person."""
        if self._person_comes <= self._world.now:
            self._person_comes = math.inf
            self._act_as_person()
            return
        self._look()
        looks = self._world.parameters.looks
        if self._world.is_training and self._alike > 2:
            quiet = looks * self._world.parameters.quiet_looks
            looks = min(quiet, max(0.0, self._world.trains_until - self._world.now) + looks)
        self._next_look = self._world.now + looks

    def hurry(self) -> None:
        """Something has happened: look as soon as the card says."""
        self._next_look = min(self._next_look, self._world.now + self._world.parameters.looks)

    # ------------------------------------------------------------------ a look
    def _look(self) -> None:
        records = self._read()
        snapshot = self.snapshot(records)
        note_out_of_service(self._run.directory, out_of_service(snapshot), snapshot.time)
        findings = detect_all(snapshot)
        for job in hanging_jobs(snapshot, findings):
            nodes = self._world.trains_on
            hanging = self._world.hanging(nodes, self._world.trains_until)
            if hanging:
                leave_stacks(self._run.directory.paths, nodes, hanging, job.raw_id)
                snapshot = self.snapshot(records)
                findings = detect_all(snapshot)
        verdict = judge(snapshot, findings)
        history = ActionHistory(self._history)
        intended = plan(
            snapshot,
            findings,
            verdict=verdict,
            history=history,
            policy_context=records.context,
        )
        situation = situation_of(
            self._run.directory,
            self._run.card,
            snapshot=snapshot,
            intended=intended,
            action_history=history,
            may_act=True,
            verdict=verdict,
        )
        seen = AlertInput(findings, unjudged_detectors(snapshot), True, situation)
        looked = seen.of(self._alerts, self._policy, snapshot.time)
        after, messages = tell(looked, self._policy, snapshot.time, situation=situation)
        self._alerts = replace(after, messages=(), events=())
        self.messages += messages
        self._world.account.mails += sum(one.kind != "digest" for one in messages)
        self.apply(intended, progress(snapshot))
        if self._needs_person() and self._person_comes == math.inf:
            self._person_comes = self._world.now + self._world.parameters.person

    def _read(self) -> RunRecords:
        """The records, and whether anything has happened since the last look."""
        scheduler = self._run.scheduler
        account = self._world.account
        seen = (
            account.launches,
            account.acts,
            self._world.launch_began,
            scheduler.jobs(),
            scheduler.nodes(),
            len(self._history),
        )
        if self._records is None or seen != self._seen:
            self._records = RunRecords.read(self._run.directory, self._world.now)
            self._seen = seen
            self._alike = 0
        self._alike += 1
        return self._records

    def apply(self, intended: Plan, reached: ProgressRecord) -> None:
        """As production carries a plan out, with its records; what the world does of it differs."""
        now = self._world.now
        journal = Journal(self._run.directory.journal)
        done = carry_out(
            intended.actions, self._effect, journal, stopped=str, progress=reached, now=now
        )
        noted = (
            ActionRecord(
                str(number),
                one.action.name,
                subject=one.action.subject,
                incident=one.action.incident,
                time=now,
                progress=reached,
                result=one.result,
                message=one.message,
            )
            for number, one in enumerate(done, len(self._history) + 1)
        )
        self._history = (*self._history, *noted)

    def _effect(self, action: Action, tag: str) -> str:
        """Do in the world what the policy plans; what was done. Raises NotDone."""
        run = self._run
        words = "done"
        if isinstance(action, Resubmit):
            run.submit(ARRAY_TASKS)
        elif isinstance(action, Exclude):
            days = run.card.resilience.exclusion_days
            words = exclude_as_planned(action, run.directory, self._queue(), days)
        elif isinstance(action, Include):
            words = include_as_planned(action, run.directory, self._queue())
        elif isinstance(action, Hold):
            run.scheduler.hold(action.subject)
        elif isinstance(action, Cancel):
            run.scheduler.cancel(action.subject)
        elif isinstance(action, Release):
            run.scheduler.release(action.subject)
        else:
            raise NotDone(f"a replay has no {action.name}")
        run.note_exclusions()
        return words

    def _queue(self) -> RunQueue:
        scheduler = self._run.scheduler
        waiting = PendingJobs(scheduler, self._run.directory, None, say=_silent)

        return RunQueue(scheduler, waiting.look, scheduler.known, kept=())

    # ------------------------------------------------------------------ the person
    def _needs_person(self) -> bool:
        """Whether a mail that is out asks for an act that only a person does."""
        return self._run.scheduler.is_held or bool(self._due()) or self._is_end_in_sight

    @property
    def _is_end_in_sight(self) -> bool:
        """Whether a mail says that few tasks are left."""
        return any(alert.detector == CHAIN_END for alert in self._alerts.open_alerts)

    def _due(self) -> tuple[str, ...]:
        listed = read_version(self._run.directory.exclusions).exclusions
        return tuple(entry.node for entry in due_for_recheck(listed, self._world.now))

    def _act_as_person(self) -> None:
        """Do what the runbook says: check the nodes that are due and let in what passes; release what
        is held.
        """
        run = self._run
        account = self._world.account
        fit = [node for node in self._due() if self._world.fault_now(node) is None]
        if fit:
            account.acts += 1
            include_nodes(run.directory, fit, self._queue(), why="it passes its checks", owner=USER)
        if run.scheduler.is_held:
            account.acts += 1
            for held in run.scheduler.held_jobs:
                run.scheduler.release(held.raw_id)
                forget_holds(run.directory, (*names_of([held], [held]), held.raw_id))
        if self._is_end_in_sight:
            account.acts += 1
            run.submit(MORE_TASKS)
        run.note_exclusions()

    # ------------------------------------------------------------------ what is seen
    def snapshot(self, records: RunRecords) -> Snapshot:
        """The run as production would see it now."""
        world = self._world
        run = self._run
        return Snapshot(
            time=world.now,
            run=self._facts,
            scheduler=run.scheduler.name,
            jobs=run.scheduler.jobs(),
            nodes=run.scheduler.nodes(),
            steps=tuple(self._steps()),
            heartbeats=self._heartbeats(records.attempts),
            attempts=records.attempts,
            checkpoints=self._checkpoints(),
            kill_switch=None,
            exclusions=records.exclusions,
            readmissions=records.readmissions,
            submissions=records.submissions,
            training=TrainingObservations(
                launch_ends=records.launch_ends, stacks=self._stacks(records.attempts)
            ),
            operation=OperationObservations(holds=records.holds, periodic_jobs=(self._pulse(),)),
        )

    def _stacks(self, attempts: Sequence[Attempt]) -> Observed[tuple[KeptStacks, ...]]:
        """What was kept of the newest attempt's hang."""
        newest = (attempt.job_id for attempt in attempts[:1])
        return read_stacks(self._run.directory.paths, newest)

    def _steps(self) -> list[Step]:
        """The last ones: those of the launch that runs, and before it those of the one before."""
        world = self._world
        run = self._run
        seconds = world.parameters.step
        done, _ = world.seen
        own = done - world.iteration
        newest = min(world.now, world.trains_until) - min(30.0, seconds)
        job = run.scheduler.running
        found = []
        for back in reversed(range(min(done, STEPS_SEEN))):
            moment = run.last_trained - (back - own) * seconds
            name = run.trained_in
            if back < own and job is not None:
                moment = newest - back * seconds
                name = job.raw_id
            found.append(Step(_step(done - back, seconds), moment, name))
        return found

    def _heartbeats(self, attempts: tuple[Attempt, ...]) -> tuple[Heartbeat, ...]:
        job = self._run.scheduler.running
        done, _ = self._world.seen
        if job is None:
            nodes = attempts[0].nodes if attempts else ()
            phase = "ended"
            when = self._run.last_trained
            name = self._run.trained_in
        else:
            nodes = job.nodes
            name = job.raw_id
            when = min(self._world.now, self._world.trains_until)
            when -= min(20.0, self._world.parameters.step)
            phase = "training" if self._world.is_training else "loading"
        return tuple(
            Heartbeat(
                place * GPUS,
                node,
                pid=100 + place * GPUS,
                phase=phase,
                iteration=done,
                time=when,
                job_id=name,
            )
            for place, node in enumerate(nodes[:RANKS_SEEN])
        )

    def _checkpoints(self) -> Checkpoints:
        _, saved = self._world.seen
        if not saved:
            return Checkpoints((), None, ())
        newest = Checkpoint(saved, True, created=self._world.now, verified="sizes")
        return Checkpoints((saved,), saved, (newest,))

    def _pulse(self) -> PeriodicJobState:
        now = self._world.now
        every = self._world.parameters.looks
        return PeriodicJobState(
            "pulse",
            "slurm",
            "login",
            started=now - every,
            ended=now - every + 10.0,
            exit_code=0,
            message="",
            interval_seconds=every,
            runs=9,
            failures_in_a_row=0,
            next_due=now,
        )


def _step(iteration: int, seconds: float) -> MeasuredStep:
    """A step of a training that goes well."""
    return MeasuredStep(
        iteration,
        None,
        None,
        None,
        seconds_per_iteration=seconds,
        learning_rate=6e-5,
        global_batch_size=2048,
        lm_loss=2.0 + 0.01 * (iteration % 3),
        grad_norm=0.2,
        samples_per_second=19.5,
        tflops=150.0,
    )


def _silent(line: str) -> None:
    """What is said of the queue is not read."""

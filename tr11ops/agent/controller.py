"""The batch controller: runs the launches of one attempt, has each failure named, and carries out
what follows.

Between a launch and the next there is no pause. Nothing is decided here: see `attribution`,
`relaunch` and `breaker`.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import takewhile
from pathlib import Path

from msgspec.structs import replace

from tr11ops.agent.allocation import free_port, master_address
from tr11ops.agent.attempt_context import AttemptContext, AttemptObservations, JobEnd
from tr11ops.agent.breaker import (
    OUT_OF_TIME,
    attempts_before,
    checkpoint_before,
    has_trained_since,
    must_hold,
    read_burned,
    why_not_begin,
)
from tr11ops.agent.exit_records import forget_earlier_life
from tr11ops.agent.job_follower import JobFollower, of_dead_host, of_ended_job
from tr11ops.agent.mitigation import (
    ActingAttempt,
    ConcurrentAttempt,
    Mitigation,
    concurrent_attempt,
    forbidding_verdict,
    switch_of,
)
from tr11ops.agent.older_checkpoint import older_sound, point_back, point_to
from tr11ops.agent.recurrence import (
    NodeFault,
    Repetition,
    failing_everywhere,
    held_because,
    is_everywhere,
    may_try_older,
    of_one_family,
    of_software,
    of_standing,
    of_trial,
    repetition,
    same_elsewhere,
    suspected_before,
    suspects_to_try_without,
    with_checks,
)
from tr11ops.agent.relaunch import (
    NOT_THE_NODES,
    Decision,
    EndTask,
    FailedLaunch,
    Relaunch,
    RelaunchBudget,
    Stop,
    blamed_nodes,
    decide,
    first_nodes,
    named_twice,
)
from tr11ops.agent.step import (
    LaunchResult,
    LaunchWatch,
    LineTee,
    StopFlag,
    WorkerLaunch,
    run_launch,
)
from tr11ops.agent.traces import (
    last_iteration_since,
    read_faults,
    read_launches,
    read_progress,
)
from tr11ops.base.observed import cause, known, observed
from tr11ops.base.units import counted
from tr11ops.cluster.base import JobState, Scheduler
from tr11ops.cluster.hostlist import compress
from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.evidence import Attribution, Evidence, Kind
from tr11ops.diagnose.attribution.records import all_failures, read_ranks, read_reports
from tr11ops.diagnose.attribution.restart import restart_after
from tr11ops.diagnose.attribution.srun import parse_lines
from tr11ops.queue.queued_jobs import PendingJobs
from tr11ops.runcard.rules import SIGNAL_SLACK_SECONDS
from tr11ops.rundir.attempts import (
    SUPERSEDED,
    AttemptVerdict,
    LaunchRecord,
    launch_line,
    of_failure,
    of_marker,
    without_restart,
)
from tr11ops.rundir.exclusion import Exclusion, NodeStanding, after_attribution, family, is_broad
from tr11ops.rundir.exclusions import Version, read_version
from trainer.contract.attempt import request_stop
from trainer.contract.documents import document
from trainer.contract.end_marker import EndMarker
from trainer.contract.files import host_name, write_json
from trainer.contract.paths import STOP_REQUEST_FILE
from trainer.contract.requests import pause_of, read_request
from trainer.contract.resumable import ResumeNeed

LOOK_SECONDS = 1.0
ZOMBIE_LOOK_SECONDS = 5.0  # between two looks at the trainers of a job without its batch host
ZOMBIE_SECONDS = 600.0  # for them to save and leave; then this task gives way
SURE = 0.8  # from this confidence on, a blamed node is taken for the fault itself


class Controller:
    """One attempt. `run` is called once, and returns the batch script's exit status."""

    def __init__(self, context: AttemptContext, stop: StopFlag, tee: LineTee) -> None:
        self._context = context
        self._config = context.config
        self._paths = context.config.paths
        self._job_id = context.allocation.job_id
        self._folder = self._paths.attempt(self._job_id)
        self._stop = stop
        self._tee = tee
        self._surroundings = AttemptObservations(context, tee)
        self._outcomes: list[FailedLaunch] = []
        # health checks that fail everywhere, and are left out: name, why
        self._failing_checks: dict[str, str] = {}
        self._next_look = 0.0
        self._is_holding = False
        self._nodes: tuple[str, ...] = ()  # of the launch
        self._over: JobEnd | None = None  # the job ended under the last launch
        attempt = ActingAttempt(
            context.config,
            context.directory,
            job_id=self._job_id,
            submission=context.submission,
            partition=context.environment.get("SLURM_JOB_PARTITION", ""),
            nodes=context.allocation.nodes,
            number=context.allocation.label,
        )
        self._attempt = attempt
        waiting = None
        if context.scheduler is not None:
            waiting = PendingJobs(
                context.scheduler,
                context.directory,
                array_id=context.allocation.array_id,
                say=tee.line,
                give_up=lambda: len(stop.received) > 1,
            )
        self._mitigation = Mitigation(attempt, context.scheduler, waiting, tee)
        self._follower = JobFollower(context, self._surroundings, self._mitigation, tee)

    # ------------------------------------------------------------------ the attempt
    def run(self) -> int:
        """Run launches until one ends as it should, or no other may follow."""
        watch = self._context.watch
        if watch is None:
            return self._run_launches()
        watch.look()
        watch.start()
        try:
            status = self._run_launches()
        finally:
            watch.stop()
        self._follower.end_own_job()
        return status

    def _run_launches(self) -> int:
        left = self._leave_at_once()
        if left is not None:
            return left
        self._follower.follow(self._nodes)
        if self._context.swaps_nodes:
            self._mitigation.prepare()
            self._end_trial_of_before()
        nodes = first_nodes(self._surroundings.situation())
        if nodes is None:
            return self._leave_for_want_of_nodes()
        number = 0
        while True:
            number += 1
            self._nodes = nodes
            record, marker, found = self._launch(number, nodes)
            left = self._leave_after(record, marker, found)
            if left is not None:
                return left
            decision = decide(self._outcomes, self._surroundings.situation(), self._budget())
            self._tell(record, found, decision)
            if isinstance(decision, Stop) and decision.why == NOT_THE_NODES:
                self._mitigation.clear_suspects(found.fault)
            self._choose_checkpoint(record)
            if self._context.swaps_nodes:
                self._mitigation.exclude_nodes(found)
                self._mitigation.suspect(replace(found, suspects=named_twice(self._outcomes)))
            if not isinstance(decision, Relaunch) or self._stop.received:
                return self._give_up(found, decision)
            if self._stopping():
                return self._leave_for_switch()
            if self._context.ordering is not None and self._context.allocation.array_id is not None:
                # the scheduler may take a job that lost a node for ended, and start the next task
                # beside it
                self._mitigation.queue_behind(self._context.ordering, self._job_id)
            nodes = decision.nodes

    def _leave_after(
        self, record: LaunchRecord, marker: EndMarker | None, found: Attribution
    ) -> int | None:
        """The exit status of an attempt whose last launch ended as it was to; None where it failed."""
        if marker is not None and (found.kind is Kind.OPERATOR or marker.reason == "refused"):
            return self._leave_by_marker(marker, found)
        if marker is None and found.kind is Kind.OPERATOR and self._ended_by():
            return self._leave_for_switch()
        if self._over is None:
            return None
        return self._leave_ended_job(record, found, self._over)

    def _leave_by_marker(self, marker: EndMarker, found: Attribution) -> int:
        """The trainer has said how it ended."""
        verdict = self._with_history(of_marker(marker))
        if marker.reason == "refused":
            verdict = replace(verdict, cause=found.kind.value, fault=found.fault)
            return self._mitigation.finish(verdict, hold=self._why_hold(marker))
        if self._came_to_nothing(marker, verdict):
            return self._end_task(replace(verdict, fault=OUT_OF_TIME))
        switch = switch_of(self._context.directory)
        return self._mitigation.finish(verdict, hold=self._why_hold(marker), switch=switch)

    def _leave_at_once(self) -> int | None:
        """The exit status of an attempt that must not start a worker; None where it may."""
        if self._stopping():
            return self._leave_for_switch()
        why, fault = self._why_hold_at_once()
        if why:
            return self._mitigation.finish(
                without_restart(replace(self._failed(why), fault=fault)), hold=why
            )
        left = self._leave_for_another()
        if left is not None:
            return left
        too_short = self._surroundings.too_short()
        if too_short:
            return self._leave_for_want_of_time(too_short)
        return None

    def _why_hold_at_once(self) -> tuple[str, str]:
        """Why nothing of this run may start, and the fault, by how the attempts before have ended;
        "" when it may.
        """
        before = forbidding_verdict(self._attempt)
        if before is not None:
            return (
                f"attempt {self._attempt.label_of(before.job_id)} ended so that nothing may start: {before.message}",
                "",
            )
        burned = read_burned(self._context.directory, self._job_id, self._context.scheduler)
        why = why_not_begin(burned, self._config.resilience.most_tasks_per_fault)
        return why, burned[0].fault if why else ""

    def _leave_for_another(self) -> int | None:
        """The exit status of an attempt beside which another one trains; None where none does."""
        ordering, scheduler = self._context.ordering, self._context.scheduler
        if ordering is None or scheduler is None or self._context.allocation.array_id is None:
            return None
        other = concurrent_attempt(self._attempt, scheduler)
        if other is not None and other.is_zombie and other.seconds_to_wait:
            other = self._wait_for_trainers(other, scheduler)
        if other is None:
            return None
        if other.is_zombie and not other.seconds_to_wait:
            self._leave_out_dead_host(other)
            self._mitigation.cancel(other.job_id)
            self._mitigation.queue_behind(ordering, self._job_id)
            return None
        self._mitigation.queue_behind(ordering, other.job_id)
        trains = f"job {self._attempt.label_of(other.job_id)} of this array still trains"
        verdict = self._failed(f"{trains}: this task goes back into the queue")
        status = self._mitigation.finish(replace(verdict, reason=SUPERSEDED))
        self._mitigation.give_back(ordering)
        return status

    def _leave_out_dead_host(self, other: ConcurrentAttempt) -> None:
        """Exclude the batch host that another job has died of, where it is gone now: that job's own
        controller, which would have done it, died with it.
        """
        if not other.gone_host or not self._context.swaps_nodes:
            return
        self._mitigation.prepare()
        self._mitigation.exclude_nodes(
            of_dead_host(other.gone_host, self._attempt.label_of(other.job_id))
        )

    def _wait_for_trainers(
        self, other: ConcurrentAttempt, scheduler: Scheduler
    ) -> ConcurrentAttempt | None:
        """Trainers live in a job that has lost its batch host: ask them to save and leave, and wait
        until they have.
        """
        lost = f"job {self._attempt.label_of(other.job_id)} has lost its batch host"
        self._tee.line(f"tr11: {lost}, its trainers may live: they shall save and leave")
        try:
            who = f"job {self._attempt.label}, which goes on in its place"
            request_stop(self._paths.stop_request(other.job_id), who)
        except OSError as error:
            self._tee.line(f"tr11: they cannot be asked: {error}")
        until = time.monotonic() + ZOMBIE_SECONDS
        found: ConcurrentAttempt | None = other
        while (
            found is not None
            and found.is_zombie
            and found.seconds_to_wait
            and time.monotonic() < until
        ):
            if self._stop.received:
                break
            time.sleep(min(found.seconds_to_wait, ZOMBIE_LOOK_SECONDS))
            found = concurrent_attempt(self._attempt, scheduler)
        return found

    def _launch(
        self, number: int, nodes: tuple[str, ...]
    ) -> tuple[LaunchRecord, EndMarker | None, Attribution]:
        """One launch, from its nodes to the reason of its end."""
        for stale in (self._paths.end_marker(self._job_id), self._folder / STOP_REQUEST_FILE):
            # of the launch before, or of a job requeued under the same number
            stale.unlink(missing_ok=True)
        forget_earlier_life(self._folder, number)
        before = read_progress(self._paths)
        record = LaunchRecord(
            number,
            nodes,
            time.time(),
            iteration_before=before.iteration,
            checkpoint_before=before.checkpoint,
            left_out_checks=tuple(self._failing_checks),
        )
        self._write(record)
        where = f"{counted(len(nodes), 'node')}: {compress(nodes)}"
        label = self._context.allocation.label
        self._tee.line(launch_line(self._job_id, label, number, where))
        watch = LaunchWatch()
        end = self._run(number, nodes, watch)
        marker = self._marker(number)
        record = self._judge_checks(record)
        after = read_progress(self._paths)
        reached = last_iteration_since(self._paths, self._job_id, record.start)
        record = replace(record, reached=reached)
        is_beyond = after.is_beyond(before)
        found = self._across_attempts(
            record, self._whose_fault(record, watch, end, marker), is_beyond
        )
        repeated = self._repetition(record, found)
        older = None
        if self._over is None:
            older = self._older_checkpoint(found, repeated)
        restart = restart_after(found, trained=reached is not None, times=repeated.times)
        self._outcomes.append(
            FailedLaunch(
                nodes,
                found.kind,
                blamed=found.blamed,
                suspects=found.suspects,
                fault=found.fault,
                progress=is_beyond,
                checks=_resting_on(found, record),
                failing_checks=tuple(self._failing_checks),
                began_at=before.checkpoint,
                times=repeated.times,
                tried_older=repeated.tried_older,
                newest_tried=repeated.newest_tried,
                older=older,
                restart=restart.answer,
                avoided=found.avoided,
            )
        )
        record = replace(
            _concluded(record, found),
            start=end.start,
            end=end.end,
            first_sign=watch.first_sign,
            exit_status=end.status,
            srun_lines=tuple(watch.srun_lines[:40]),
            iteration_after=after.iteration,
            checkpoint_after=after.checkpoint,
            failing_checks=tuple(self._failing_checks),
            failing_because=dict(self._failing_checks),
            older_checkpoint=older,
            restart=restart.answer.value,
            restart_confidence=restart.confidence,
            restart_why=restart.why,
        )
        self._write(record)
        if is_beyond and self._context.swaps_nodes:
            self._note_progress(record, found)
        return record, marker, found

    def _note_progress(self, record: LaunchRecord, found: Attribution) -> None:
        """A launch has trained: that speaks for its nodes, and against those that were left out to
        tell.
        """
        accused = {*found.blamed, *found.suspects}
        seconds = (record.end or record.start) - record.start
        self._mitigation.note_good_use(
            [node for node in record.nodes if node not in accused], seconds
        )
        self._step_up(self._mitigation.trial())

    def _step_up(self, tried: Sequence[Exclusion]) -> None:
        if tried:
            names = compress(entry.node for entry in tried)
            self._mitigation.step_up(
                tried, f"without {names} the training went on, which had not before"
            )

    def _end_trial_of_before(self) -> None:
        """A task that ran without suspects may have been killed before it could say that it
        trained.
        """
        directory = self._context.directory
        tried = self._mitigation.trial()
        self._step_up(
            [entry for entry in tried if has_trained_since(directory, self._job_id, entry.job_id)]
        )

    def _run(self, number: int, nodes: tuple[str, ...], watch: LaunchWatch) -> LaunchResult:
        slurm = self._config.slurm
        allocation, peers = replace(self._context.allocation, nodes=nodes), self._context.peers
        port = slurm.master_port or free_port()
        launch = WorkerLaunch(
            number=number,
            attempt=self._folder,
            card=self._card(number),
            job_id=self._job_id,
            nodes=nodes,
            workers_per_node=slurm.workers,
            master_address=master_address(allocation) if peers is None else peers.rendezvous.host,
            master_port=port if peers is None or port != peers.rendezvous.port else free_port(),
            container=slurm.container if allocation.kind == "slurm" else None,
            uses_gpus=slurm.gpus_per_node > 0,
        )
        environment = {**self._context.environment, "TR11_JOB_ID": self._job_id}
        within = self._config.resilience.end_within_seconds
        return run_launch(
            launch,
            allocation,
            environment=environment,
            tee=self._tee,
            stop=self._stop,
            watch=watch,
            end_within_seconds=within,
            look=self._look,
            others=peers,
        )

    def _card(self, number: int) -> Path:
        """The card of a launch: a later one has what is left of the exit duration, and fewer health
        checks.
        """
        first = self._folder / "card.json"
        minutes = self._config.run.exit_duration_minutes
        if number == 1 or (minutes is None and not self._failing_checks):
            return first
        value = json.loads(first.read_text(encoding="utf-8"))
        if minutes is not None:
            value["run"]["exit_duration_minutes"] = max(
                minutes - (time.time() - self._surroundings.started) / 60, 0.01
            )
        skipped = [*value["resilience"].get("skip_checks", ()), *self._failing_checks]
        value["resilience"]["skip_checks"] = skipped
        path = self._folder / "launches" / f"{number}.card"
        write_json(path, value)
        return path

    # ------------------------------------------------------------------ what happened
    def _marker(self, number: int) -> EndMarker | None:
        try:
            return EndMarker.of_launch(self._folder, number)
        except (OSError, ValueError) as error:
            self._tee.line(f"tr11: the end marker cannot be read: {error}")
            return None

    def _judge_checks(self, record: LaunchRecord) -> LaunchRecord:
        """The launch with what its health checks said. One that fails everywhere condemns no node:
        it is left out from now on, and the exclusions that rest on it are taken back.
        """
        checked = with_checks(record, read_reports(self._folder, record.launch))
        are_machines = self._context.swaps_nodes or self._context.peers is not None
        if not checked.failed_checks or not are_machines:
            return checked
        failing = failing_everywhere(checked, read_launches(self._folders()))
        if failing:
            self._failing_checks |= {check.name: str(check) for check in failing}
            why = f"{'; '.join(map(str, failing))}: it is not the nodes"
            self._mitigation.take_back_of_checks(failing, why)
            self._mitigation.wait()  # the next launch may need the nodes that come back
        return checked

    def _whose_fault(
        self, record: LaunchRecord, watch: LaunchWatch, end: LaunchResult, marker: EndMarker | None
    ) -> Attribution:
        """As the evidence says; but where the job is over, that is why its launch ended, whatever
        its workers said.
        """
        found = self._attribute(record, watch, end, marker)
        in_order = marker is not None and end.status == 0
        if in_order or found.kind is Kind.OPERATOR:
            self._over = None
        else:
            self._over = self._surroundings.why_over()
        if self._over is None:
            return found
        return of_ended_job(self._over, self._context.allocation.nodes)

    def _attribute(
        self, record: LaunchRecord, watch: LaunchWatch, end: LaunchResult, marker: EndMarker | None
    ) -> Attribution:
        asked = self._stop.received
        in_order = marker is not None and marker.reason not in {"error", "refused"}
        if not in_order or end.status != 0:
            self._surroundings.look()
        evidence = Evidence(
            nodes=record.nodes,
            status=end.status,
            marker=marker,
            stopped_by=signal.Signals(asked[0]).name
            if asked and (in_order or len(asked) > 1)
            else "",
            ended_by=self._ended_by(),
            unwritable=""
            if in_order
            else self._write(replace(record, end=end.end, exit_status=end.status)),
            srun=parse_lines(watch.srun_lines),
            failures=all_failures(self._folder, record),
            reports=read_reports(self._folder, record.launch),
            ranks=read_ranks(self._folder),
            states=self._surroundings.states,
            overdue=watch.overdue and self._context.swaps_nodes,
            worker_statuses=watch.worker_statuses,
            lost=self._context.peers.lost() if self._context.peers is not None else {},
            fixed_port=self._config.slurm.master_port,
            failing_checks=self._failing_checks,
            reached=record.reached,
        )
        failed = not in_order or end.status != 0
        # each time: the next launch's is to be told apart
        code = None
        if failed:
            code = self._surroundings.step_code()
        return attribute(
            replace(evidence, derived_exit_code=code) if evidence.needs_step_code else evidence
        )

    def _folders(self) -> tuple[Path, ...]:
        """Of this attempt and of those before it, newest first."""
        return (
            self._folder,
            *(folder for folder, _ in attempts_before(self._context.directory, self._job_id)),
        )

    def _across_attempts(
        self, record: LaunchRecord, found: Attribution, is_beyond: bool
    ) -> Attribution:
        """What `found` is once earlier launches are looked at.

        A fault that follows the training is no node's: the exclusions that rest on its earlier
        appearances are taken back. A node that is suspected again is avoided, then blamed.
        `is_beyond`: the launch has trained.
        """
        if not self._context.swaps_nodes:
            return found
        tried = self._mitigation.trial()
        if tried and not is_beyond and not found.blamed and family(found.fault) == tried[0].fault:
            better = of_trial(found, record.nodes, tried)
            self._mitigation.end_trial(better.summary, [entry.node for entry in tried])
            self._mitigation.clear_suspects(found.fault)
            return better
        if is_everywhere(found, record.nodes):
            self._mitigation.clear_suspects(found.fault)
        if found.kind is not Kind.NODE:
            return found
        last = NodeFault.of(self._job_id, _concluded(record, found))
        folders = self._folders()
        faults = read_faults(folders)
        before = [fault for fault in faults if fault.nodes]
        others = same_elsewhere(last, before)
        if not others and last.is_suspicion:
            known_before = suspected_before(last, before, read_launches(folders))
            return self._once_more(record, found, last, known_before)
        if not others:
            return found
        better = of_software(found, last, others)
        self._mitigation.take_back((*others, *of_one_family(last, faults)), better.summary)
        return better

    def _once_more(
        self, record: LaunchRecord, found: Attribution, last: NodeFault, before: Sequence[NodeFault]
    ) -> Attribution:
        """What a suspicion is beside those just before it, the run's list and the other runs' word."""
        version = known(
            observed(lambda: read_version(self._context.directory.exclusions)), Version(0, ())
        )
        shared = self._surroundings.shared()
        states, told = [], []
        for node in last.nodes:
            own, others = version.on_record(node), shared.of(node)
            faults = [one.fault for one in before]
            broad = is_broad(len(last.nodes), len(record.nodes))
            states.append(
                after_attribution(found.fault, faults, own=own, others=others, of_broad_set=broad)
            )
            told += [
                *others,
                *([own] if own is not None and own.state != NodeStanding.SUSPECT else []),
            ]
        steps = list(NodeStanding)
        state = min(states, key=steps.index)
        if state is NodeStanding.SUSPECT:
            return found
        if state is NodeStanding.AVOID:
            why_not = self._mitigation.why_not_leave_out(last.nodes, self._surroundings.states)
            if why_not:
                self._tee.line(
                    f"tr11: {compress(last.nodes)} is suspected again and used on: {why_not}"
                )
                return found
        return of_standing(found, last, before=before, state=state, known=told)

    def _repetition(self, record: LaunchRecord, found: Attribution) -> Repetition:
        """How often in a row this fault came at this step, since a person last let go what was held
        for one.
        """
        last = NodeFault.of(self._job_id, _concluded(record, found))
        earlier = attempts_before(self._context.directory, self._job_id)
        unheld = takewhile(lambda entry: entry[1] is None or not entry[1].held, earlier)
        before = read_faults((self._folder, *(folder for folder, _ in unheld)))
        return repetition(
            last,
            (one for one in before if (one.job_id, one.launch) != (self._job_id, record.launch)),
        )

    def _older_checkpoint(self, found: Attribution, repeated: Repetition) -> int | None:
        """The older checkpoint from which the training should go on after this fault; None for the
        usual one.
        """
        newest = repeated.began_at[0]
        if newest is None or not may_try_older(found.kind, repeated):
            return None
        try:
            return older_sound(self._paths, newest, ResumeNeed.of(self._config))
        except (OSError, ValueError) as error:
            self._tee.line(
                f"tr11: whether an older checkpoint can be tried cannot be told: {cause(error)}"
            )
            return None

    def _choose_checkpoint(self, record: LaunchRecord) -> None:
        """Let the next launch begin from the older checkpoint that is to be tried, or from the
        newest one again.
        """
        older, newest, last = record.older_checkpoint, record.checkpoint_before, self._outcomes[-1]
        need = ResumeNeed.of(self._config)
        try:
            if older is not None:
                point_to(self._paths, older, self._job_id)
                why = (
                    f"launches that begin from step {newest} end at iteration {record.reached}, {last.times} times so "
                    f"far: the training goes on from the older checkpoint of step {older}"
                )
                self._tee.line(f"tr11: {why}; step {newest} stays where it is")
                self._mitigation.note("older-checkpoint", why, {"doubted": newest, "step": older})
            elif last.tried_older and point_back(
                self._paths, last.began_at, newest=last.newest_tried, need=need, job_id=self._job_id
            ):
                newest = last.newest_tried
                why = f"the older checkpoint of step {last.began_at} was no cure: step {newest} is resumed from again"
                self._tee.line(f"tr11: {why}")
                self._mitigation.note("older-checkpoint", why, {"step": newest})
        except (OSError, ValueError) as error:
            self._tee.line(f"tr11: the checkpoint to begin from cannot be chosen: {cause(error)}")

    def _budget(self) -> RelaunchBudget:
        resilience = self._config.resilience
        return RelaunchBudget(resilience.launches_per_attempt, resilience.launches_without_progress)

    # ------------------------------------------------------------------ ends of the job itself
    def _leave_ended_job(self, record: LaunchRecord, found: Attribution, over: JobEnd) -> int:
        """The job is over, though this process lives: start nothing more in it, and see that it
        ends.
        """
        self._tell(record, found, EndTask(f"{over.why}: nothing more is started in it"))
        if over.state is JobState.RUNNING:
            self._mitigation.exclude_nodes(found)
            self._mitigation.wait()
        saved = read_progress(self._paths).checkpoint or 0  # what was trained since is lost
        is_beyond = saved > (checkpoint_before(self._folder) or 0)
        verdict = replace(
            self._failed(over.why), cause=found.kind.value, fault=found.fault, progress=is_beyond
        )
        return self._end_task(verdict)

    def _leave_for_want_of_time(self, why: str) -> int:
        """The job's limit leaves no time to train and save: hold what would meet the same, let a
        longer task go on.
        """
        verdict = replace(self._failed(why), cause=Kind.CONFIGURATION.value, fault=OUT_OF_TIME)
        job = self._surroundings.job_time()
        if job is not None and job.limit is not None and self._mitigation.has_longer(job.limit):
            return self._end_task(verdict)
        return self._mitigation.finish(without_restart(verdict), hold=why)

    def _came_to_nothing(self, marker: EndMarker, verdict: AttemptVerdict) -> bool:
        """Whether the trainer left for its job's limit before it had trained: the next task may
        meet the same.
        """
        if verdict.progress or not marker.restart or switch_of(self._context.directory):
            return False
        if marker.reason == "exit-duration":
            return True
        left, early = (
            self._surroundings.seconds_to_limit(),
            self._config.slurm.signal_seconds_before_limit,
        )
        if marker.reason != "signal" or left is None or early is None:
            return False
        return left < early + SIGNAL_SLACK_SECONDS

    # ------------------------------------------------------------------ stop switches
    def _stopping(self) -> str:
        """Why this attempt must not train: "kill-switch", "pause", or ""."""
        if self._context.directory.kill_switch_is_set():
            return "kill-switch"
        if pause_of(self._paths, self._job_id) is not None:
            return "pause"
        return ""

    def _ended_by(self) -> str:
        """Who asked for an end at once, without saving; "" where no one does."""
        request = read_request(self._context.directory.kill_switch, "kill")
        if request is not None and request.kind == "kill-now":
            return str(request)
        return ""

    def _look(self) -> None:
        """While a launch runs: hold queued jobs as soon as a stop switch is there, and let it go if
        it vanishes.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._follower.follow(self._nodes)
        switch = switch_of(self._context.directory)
        if switch and not self._is_holding:
            self._is_holding = True
            self._mitigation.hold(switch)
        elif not switch and self._is_holding:
            self._is_holding = False
            self._mitigation.release()

    def _leave_for_switch(self) -> int:
        """A stop switch is set: leave without starting a worker, and let no other task start only
        to do the same.
        """
        reason = self._stopping()
        path = self._context.directory.kill_switch if reason == "kill-switch" else self._paths.pause
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        what = "kill switch" if reason == "kill-switch" else "pause"
        line = f"[Detected {what} at {path}. Exiting] datetime: {stamp} "
        self._tee.line(line)
        marker = self._leave_marker(reason, line.strip())
        verdict = self._with_history(of_marker(marker))
        return self._mitigation.finish(
            verdict, hold=self._why_hold(marker), switch=switch_of(self._context.directory)
        )

    def _leave_marker(self, reason: str, message: str) -> EndMarker:
        """The end marker of an attempt of which no trainer can leave one."""
        step = read_progress(self._paths).checkpoint
        marker = EndMarker(
            reason=reason,
            iteration=step or 0,
            checkpoint_step=step,
            restart=False,
            message=message,
            time=time.time(),
            host=host_name(),
            job_id=self._job_id,
            launch=len(self._outcomes),
        )
        try:
            write_json(self._paths.end_marker(self._job_id), document(marker))
        except OSError as error:
            self._tee.line(f"tr11: the end marker cannot be written: {error}")
        return marker

    def _why_hold(self, marker: EndMarker) -> str:
        """Why the queued jobs must not start after this end; "" when it should."""
        switch = switch_of(self._context.directory)
        if switch:
            return f"the {'kill switch is set' if switch == 'kill-switch' else 'run is paused'}"
        if marker.restart:
            return ""
        words = marker.message.removeprefix("tr11: ")
        if marker.reason == "superseded":
            return words
        return f"{marker.reason}: {words}"

    # ------------------------------------------------------------------ ends
    def end_without_launch(self, found: Attribution) -> int:
        """The end of an attempt whose agent never began: a bad node is excluded, a bad card holds
        queued jobs.
        """
        self._tee.line(
            f"tr11: job {self._attempt.label} could not start ({found.kind}): {found.summary}"
        )
        data = {
            "cause": found.kind.value,
            "blamed": list(found.blamed),
            "evidence": list(found.evidence),
        }
        self._mitigation.note("start-failed", found.summary, data)
        if self._context.swaps_nodes and found.blamed:
            self._mitigation.prepare()
            self._mitigation.exclude_nodes(found)
            self._mitigation.wait()
        refused = found.kind is Kind.CONFIGURATION
        if refused:
            ended = of_marker(self._leave_marker("refused", found.summary))
        else:
            ended = self._failed(found.summary)
        verdict = replace(
            ended,
            cause=found.kind.value,
            fault=found.fault,
            blamed=found.blamed,
            evidence=found.evidence,
        )
        if refused:
            return self._mitigation.finish(verdict, hold=f"{found.kind}: {found.summary}")
        return self._end_task(verdict)

    def _leave_for_want_of_nodes(self) -> int:
        """Too many of the allocation's nodes are excluded: the scheduler gave them before it knew."""
        usable = self._surroundings.situation().usable
        barred = [node for node in self._context.allocation.nodes if node not in usable]
        left = counted(len(usable), "node is", "nodes are")
        why = f"{compress(barred)} of this allocation may not be used, and {left} too few"
        self._mitigation.refresh()
        return self._end_task(
            replace(
                self._failed(why), cause=Kind.NODE.value, fault="excluded nodes in the allocation"
            )
        )

    def _give_up(self, found: Attribution, decision: Decision) -> int:
        """The last launch failed and none follows."""
        # whether the nodes could be excluded decides whether the next task may start
        self._mitigation.wait()
        message = found.summary
        if self._stop.received and isinstance(decision, Relaunch):
            message = f"{found.summary}; no further launch: {signal.Signals(self._stop.received[0]).name} received"
        left_out = found.blamed or found.avoided
        is_sure = bool(left_out) and found.confidence >= SURE and self._context.swaps_nodes
        verdict = replace(self._failed(message), cause=found.kind.value, fault=found.fault)
        if is_sure:  # who is left out cannot do it again
            left = f"node {', '.join(left_out)}"
            verdict = replace(verdict, fault=left, launch_fault=found.fault)
        if isinstance(decision, Stop) and self._tries_without_suspects(verdict):
            return self._mitigation.finish(verdict)
        if isinstance(decision, Stop):
            return self._mitigation.finish(
                without_restart(verdict), hold=held_because(decision.why, found.summary)
            )
        if self._stop.received or found.kind is Kind.OPERATOR:
            return self._mitigation.finish(
                verdict, hold=self._switch_hold(), switch=switch_of(self._context.directory)
            )
        return self._end_task(verdict)

    def _end_task(self, verdict: AttemptVerdict) -> int:
        """Let the next task go on, unless this fault has burned as many as it may."""
        why = self._switch_hold()
        switch = ""
        if why:
            switch = switch_of(self._context.directory)
        if not why:
            why = self._mitigation.why_left_in_use()
        begins_elsewhere = bool(self._outcomes) and self._outcomes[-1].older is not None
        if not why and not verdict.progress and not begins_elsewhere:
            burned = read_burned(self._context.directory, self._job_id, self._context.scheduler)
            why = must_hold(verdict.fault, burned, self._config.resilience.most_tasks_per_fault)
            if why and self._tries_without_suspects(verdict):
                why = ""
        is_over = why and not switch
        return self._mitigation.finish(
            without_restart(verdict) if is_over else verdict, hold=why, switch=switch
        )

    def _tries_without_suspects(self, verdict: AttemptVerdict) -> bool:
        """Whether the next task runs without the nodes that may be at fault, before anything is
        held for this fault.

        One such task tells: where it fails the same way, it is not the nodes. Only while enough
        others are free.
        """
        may_be_a_nodes = verdict.cause in {Kind.NODE.value, Kind.UNKNOWN.value}
        if not self._context.swaps_nodes or not may_be_a_nodes or self._mitigation.trial():
            return False
        burned = read_burned(self._context.directory, self._job_id, self._context.scheduler)
        folders = [self._folder, *(self._paths.attempt(one.job_id) for one in burned)]
        suspects = suspects_to_try_without(read_faults(folders), verdict.fault)
        if not suspects:
            return False
        self._surroundings.look()
        why_not = self._mitigation.why_not_leave_out(suspects, self._surroundings.states)
        if why_not:
            self._tee.line(
                f"tr11: no task can be tried without {compress(suspects)}, which may be at fault: {why_not}"
            )
            return False
        return self._mitigation.try_without(
            suspects, verdict.fault, verdict.message, [verdict.message]
        )

    def _switch_hold(self) -> str:
        switch = switch_of(self._context.directory)
        if switch:
            return f"{switch} is set"
        return ""

    def _failed(self, message: str) -> AttemptVerdict:
        training_progress = read_progress(self._paths)
        return self._with_history(
            of_failure(message, training_progress.iteration, training_progress.checkpoint)
        )

    def _with_history(self, verdict: AttemptVerdict) -> AttemptVerdict:
        return replace(
            verdict,
            launches=len(self._outcomes),
            progress=any(outcome.progress for outcome in self._outcomes),
            blamed=blamed_nodes(self._outcomes),
        )

    # ------------------------------------------------------------------ words
    def _tell(self, record: LaunchRecord, found: Attribution, decision: Decision) -> None:
        what = {"Relaunch": "starting again", "EndTask": "ending this task", "Stop": "stopping"}
        line = f"{what[type(decision).__name__]}: {decision.why}"
        self._tee.line(f"tr11: launch {record.launch} failed ({found.kind}): {found.summary}")
        self._tee.line(f"tr11: {line}")
        self._write(replace(record, decision=line))
        data = {
            "launch": record.launch,
            "nodes": list(record.nodes),
            "cause": found.kind.value,
            "blamed": list(found.blamed),
            "suspects": list(found.suspects),
            "evidence": list(found.evidence),
            "decision": line,
        }
        self._mitigation.note("launch-failed", found.summary, data)

    def _write(self, record: LaunchRecord) -> str:
        """Keep the record of a launch, which matters more; why it cannot be kept, "" when it is."""
        try:
            record.write(self._folder)
        except OSError as error:
            self._tee.line(f"tr11: the record of launch {record.launch} cannot be written: {error}")
            return f"{self._folder}: {error.strerror or error}"
        return ""


def _concluded(record: LaunchRecord, found: Attribution) -> LaunchRecord:
    """The launch with whose fault its end was."""
    return replace(
        record,
        cause=found.kind.value,
        summary=found.summary,
        confidence=found.confidence,
        blamed=found.blamed,
        suspects=found.suspects,
        avoided=found.avoided,
        evidence=found.evidence,
        fault=found.fault,
    )


def _resting_on(found: Attribution, launch: LaunchRecord) -> tuple[str, ...]:
    """The health checks on which the blame of a launch rests; none where it rests on something
    else.
    """
    if found.rule != "health":
        return ()
    return tuple(
        name for name, nodes in launch.failed_checks.items() if set(nodes) & set(found.blamed)
    )

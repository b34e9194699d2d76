"""One launch of an attempt after another: from the nodes that it starts on to whose fault its end
was, judged beside all launches before it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from msgspec.structs import replace

from tr11ops.agent.attempt_context import AttemptContext, AttemptObservations, JobEnd
from tr11ops.agent.breaker import older_sound, point_back, point_to
from tr11ops.agent.exit_records import forget_earlier_life
from tr11ops.agent.job_follower import JobFollower, of_ended_job
from tr11ops.agent.mitigation import Mitigation, switch_of
from tr11ops.agent.recurrence import (
    NodeFault,
    Repetition,
    failing_everywhere,
    is_everywhere,
    may_try_older,
    of_one_family,
    of_software,
    of_standing,
    of_trial,
    repetition,
    same_elsewhere,
    suspected_before,
    with_checks,
)
from tr11ops.agent.step import (
    LaunchWatch,
    LineTee,
    StopFlag,
)
from tr11ops.agent.traces import (
    last_iteration_since,
    logged_iteration,
    read_awaited,
    read_faults,
)
from tr11ops.agent.workers import PlannedLaunch, Workers
from tr11ops.base.now import monotonic, now
from tr11ops.base.observed import cause, known, observed
from tr11ops.base.units import counted
from tr11ops.cluster.arrays import compress
from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.by_machines import of_order
from tr11ops.diagnose.attribution.evidence import Attribution, Evidence, Kind
from tr11ops.diagnose.attribution.records import all_failures, read_ranks, read_reports
from tr11ops.diagnose.attribution.restart import restart_after
from tr11ops.diagnose.attribution.srun import parse_lines
from tr11ops.launch.margins import next_interval, read_history, read_launches
from tr11ops.runcard.card import ForeignCard
from tr11ops.runcard.save_interval import SaveInterval
from tr11ops.runcard.speed import RunHistory
from tr11ops.rundir.attempts import LaunchRecord, attempts_before, launch_line
from tr11ops.rundir.exclusion import Exclusion, NodeStanding, after_attribution, family, is_broad
from tr11ops.rundir.exclusions import Version, read_version
from tr11ops.rundir.paths import RunDirectory
from tr11ops.trainers.kept_files import START_FILE, stop_order_of
from tr11ops.trainers.stopping import ORDER_FILE
from trainer.contract.attempt import BAD_REASONS, EndMarker
from trainer.contract.documents import document
from trainer.contract.files import host_name, write_json
from trainer.contract.paths import STOP_REQUEST_FILE, newest_step
from trainer.contract.requests import read_request

LOOK_SECONDS = 1.0


class Launches:
    """The launches of one attempt. `outcomes` are those that have ended. Of the last one:
    `repeated` says how often its fault came in a row, `over` that the job ended under it.
    """

    def __init__(
        self,
        context: AttemptContext,
        observations: AttemptObservations,
        mitigation: Mitigation,
        stop: StopFlag,
        tee: LineTee,
        workers: Workers,
    ) -> None:
        self._workers = workers
        self._context = context
        self._config = context.config
        self._paths = context.config.paths
        self._job_id = context.job_id
        self._folder = context.folder
        self._observations = observations
        self._mitigation = mitigation
        self._exclusions = mitigation.exclusions
        self._stop = stop
        self._tee = tee
        self._say = tee.say
        self.follower = JobFollower(context, observations, mitigation, tee)
        self.outcomes: list[LaunchRecord] = []
        self.repeated = Repetition(())
        self.over: JobEnd | None = None
        # health checks that fail everywhere, and are left out: name, why
        self._failing_checks: dict[str, str] = {}
        self._next_look = 0.0
        self._is_holding = False
        self._nodes: tuple[str, ...] = ()  # of the launch that runs
        self._running: LaunchRecord | None = None  # that launch, until it was told to end

    def run(
        self, number: int, nodes: tuple[str, ...]
    ) -> tuple[LaunchRecord, EndMarker | None, Attribution]:
        """One launch, from its nodes to the reason of its end."""
        self._nodes = nodes
        for stale in (
            self._paths.end_marker(self._job_id),
            *(self._folder / name for name in (STOP_REQUEST_FILE, START_FILE, ORDER_FILE)),
        ):
            # of the launch before, or of a job requeued under the same number
            stale.unlink(missing_ok=True)
        forget_earlier_life(self._folder, number)
        saves = self._save_interval()
        save_minutes = None if saves is None else saves.minutes
        record = LaunchRecord(
            number,
            nodes,
            now(),
            iteration_before=logged_iteration(self._paths),
            checkpoint_before=newest_step(self._paths),
            left_out_checks=tuple(self._failing_checks),
            save_minutes=save_minutes,
        )
        self.write(record)
        self._running = record
        where = f"{counted(len(nodes), 'node')}: {compress(nodes)}"
        label = self._context.allocation.label
        self._tee.line(launch_line(self._job_id, label, number, where))
        if saves is not None:
            self._say(str(saves))
        watch = LaunchWatch(start=record.start)
        self._workers.run(
            PlannedLaunch(
                number,
                nodes,
                started=self._observations.started,
                skipped=tuple(self._failing_checks),
                save_minutes=save_minutes,
            ),
            watch,
            self._look,
        )
        marker = self._marker(number) or self._marker_of_order(number, watch)
        record = self._judge_checks(record)
        record = replace(
            record,
            reached=last_iteration_since(self._paths, self._job_id, record.start),
            iteration_after=logged_iteration(self._paths),
            checkpoint_after=newest_step(self._paths),
        )
        found = self._across_attempts(record, self._whose_fault(record, watch, marker))
        record = concluded(record, found)
        self.repeated = self._repetition(record)
        older = None
        if self.over is None:
            older = self._older_checkpoint(found, self.repeated)
        restart = restart_after(
            found, trained=record.reached is not None, times=self.repeated.times
        )
        record = replace(
            record,
            start=watch.start,
            end=watch.end,
            first_sign=watch.first_sign,
            exit_status=watch.status,
            srun_lines=tuple(watch.srun_lines[:40]),
            failing_checks=tuple(self._failing_checks),
            failing_because=dict(self._failing_checks),
            older_checkpoint=older,
            restart=restart.answer.value,
            restart_confidence=restart.confidence,
            restart_why=restart.why,
        )
        self.outcomes.append(record)
        self.write(record)
        if record.has_progress and self._context.swaps_nodes:
            self._note_progress(record, found)
        return record, marker, found

    def _save_interval(self) -> SaveInterval | None:
        """How often the launch that begins saves, which is said and put on record."""
        # the launches of this attempt have measured more
        measured = known(observed(read_history, self._paths), RunHistory())
        history = measured.or_else(self._context.history)
        saves = next_interval(self._config, self._paths, history, self._context.free_bytes)
        if saves is not None:
            self._mitigation.note("save-interval", str(saves), {"minutes": saves.minutes})
        return saves

    def _note_progress(self, record: LaunchRecord, found: Attribution) -> None:
        """A launch has trained: that speaks for its nodes, and against those that were left out to
        tell.
        """
        accused = {*found.blamed, *found.suspects}
        seconds = (record.end or record.start) - record.start
        self._exclusions.note_good_use(
            [node for node in record.nodes if node not in accused], seconds
        )
        self._exclusions.step_up(self._exclusions.trial())

    def _look(self) -> None:
        """While a launch runs: hold queued jobs as soon as a stop switch is there, and let it go if
        it vanishes. What ends it is kept at once: the job may be killed before its workers have left.
        """
        if self._running is not None and signal.SIGTERM in self._stop.received:
            told = of_order(
                "SIGTERM to the batch script; the job was ended before its workers left"
            )
            self.write(concluded(self._running, told))
            self._running = None
        if monotonic() < self._next_look:
            return
        self._next_look = monotonic() + LOOK_SECONDS
        self.follower.follow(self._nodes)
        switch = switch_of(self._context.directory)
        if switch and not self._is_holding:
            self._is_holding = True
            self._mitigation.hold(switch)
        elif not switch and self._is_holding:
            self._is_holding = False
            self._mitigation.release()

    def write(self, record: LaunchRecord) -> str:
        """Keep the record of a launch, which matters more; why it cannot be kept, "" when it is."""
        try:
            record.write(self._folder)
        except OSError as error:
            self._say(f"the record of launch {record.launch} cannot be written: {error}")
            return f"{self._folder}: {error.strerror or error}"
        return ""

    def _marker(self, number: int) -> EndMarker | None:
        try:
            return EndMarker.of_launch(self._folder, number)
        except (OSError, ValueError) as error:
            self._say(f"the end marker cannot be read: {error}")
            return None

    def _marker_of_order(self, number: int, watch: LaunchWatch) -> EndMarker | None:
        """The last word of a foreign launch that failed while it did what it was asked to: its keeper
        is ended with it, and may not have come to that.
        """
        order = stop_order_of(self._folder, number)
        failed = watch.first_sign or watch.end
        if order is None or failed is None or failed < order.moment:
            return None
        return self.leave_marker(
            number,
            order.reason,
            order.line,
            iteration=logged_iteration(self._paths),
            restart=order.restart,
        )

    def leave_marker(
        self,
        number: int,
        reason: str,
        message: str,
        iteration: int | None = None,
        restart: bool = False,
    ) -> EndMarker:
        """Leave the end marker of a launch, or of the attempt before its first, whose trainer cannot.
        `iteration`: the last one, where it is not that of the newest checkpoint.
        """
        step = newest_step(self._paths)
        marker = EndMarker(
            reason=reason,
            iteration=iteration or step or 0,
            checkpoint_step=step,
            restart=restart,
            message=message,
            time=now(),
            host=host_name(),
            job_id=self._job_id,
            launch=number,
        )
        try:
            write_json(self._paths.end_marker(self._job_id), document(marker))
        except OSError as error:
            self._say(f"the end marker cannot be written: {error}")
        return marker

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
            self._exclusions.take_back_of_checks(failing, why)
            self._mitigation.wait()  # the next launch may need the nodes that come back
        return checked

    def _whose_fault(
        self, record: LaunchRecord, watch: LaunchWatch, marker: EndMarker | None
    ) -> Attribution:
        """As the evidence says; but where the job is over, that is why its launch ended, whatever
        its workers said.
        """
        found = self._attribute(record, watch, marker)
        in_order = marker is not None and watch.status == 0
        if in_order or found.kind is Kind.OPERATOR:
            self.over = None
        else:
            self.over = self._observations.why_over()
        if self.over is None:
            return found
        return of_ended_job(self.over, self._context.allocation.nodes)

    def _attribute(
        self, record: LaunchRecord, watch: LaunchWatch, marker: EndMarker | None
    ) -> Attribution:
        asked = self._stop.received
        in_order = marker is not None and marker.reason not in BAD_REASONS
        if not in_order or watch.status != 0:
            self._observations.look()
        ranks = read_ranks(self._folder)
        evidence = Evidence(
            nodes=record.nodes,
            status=watch.status,
            marker=marker,
            stopped_by=signal.Signals(asked[0]).name
            if asked and (in_order or len(asked) > 1)
            else "",
            ended_by=ended_by(self._context.directory),
            unwritable=""
            if in_order
            else self.write(replace(record, end=watch.end, exit_status=watch.status)),
            srun=parse_lines(watch.srun_lines),
            failures=all_failures(self._folder, record),
            reports=read_reports(self._folder, record.launch),
            ranks=ranks,
            awaited=read_awaited(self._paths, self._job_id, record, ranks),
            states=self._observations.states,
            overdue=watch.overdue and self._context.swaps_nodes,
            worker_statuses=self._meant_statuses(watch),
            lost=self._context.peers.lost() if self._context.peers is not None else {},
            fixed_port=self._config.slurm.master_port,
            failing_checks=self._failing_checks,
            reached=record.reached,
        )
        failed = not in_order or watch.status != 0
        # each time: the next launch's is to be told apart
        code = None
        if failed:
            code = self._observations.step_code()
        if evidence.needs_step_code:
            evidence = replace(evidence, derived_exit_code=code)
        return attribute(evidence)

    def _meant_statuses(self, watch: LaunchWatch) -> Mapping[int, int]:
        """The workers' exit statuses, where they have tr11's meaning: of another trainer 2 is no
        refusal, but what any script says to wrong words.
        """
        if isinstance(self._config, ForeignCard):
            return {}
        return watch.worker_statuses

    def _folders(self) -> tuple[Path, ...]:
        """Of this attempt and of those before it, newest first."""
        return (
            self._folder,
            *(folder for folder, _ in attempts_before(self._context.directory.paths, self._job_id)),
        )

    def _across_attempts(self, record: LaunchRecord, found: Attribution) -> Attribution:
        """What `found` is once earlier launches are looked at.

        A fault that follows the training is no node's: the exclusions that rest on its earlier
        appearances are taken back. A node that is suspected again is avoided, then blamed.
        """
        if not self._context.swaps_nodes:
            return found
        tried = self._exclusions.trial()
        if (
            tried
            and not record.has_progress
            and not found.blamed
            and family(found.fault) == tried[0].fault
        ):
            better = of_trial(found, record.nodes, tried)
            self._exclusions.end_trial(better.summary, [entry.node for entry in tried])
            self._exclusions.clear_suspects(found.fault)
            return better
        if is_everywhere(found, record.nodes):
            self._exclusions.clear_suspects(found.fault)
        if found.kind is not Kind.NODE:
            return found
        last = NodeFault.of(self._job_id, concluded(record, found))
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
        self._exclusions.take_back((*others, *of_one_family(last, faults)), better.summary)
        return better

    def _once_more(
        self, record: LaunchRecord, found: Attribution, last: NodeFault, before: Sequence[NodeFault]
    ) -> Attribution:
        """What a suspicion is beside those just before it, the run's list and the other runs' word."""
        version = known(observed(read_version, self._context.directory.exclusions), Version(0, ()))
        shared = self._observations.shared()
        states = []
        told = list[Exclusion]()
        for node in last.nodes:
            own = version.on_record(node)
            others = shared.of(node)
            faults = [one.fault for one in before]
            broad = is_broad(len(last.nodes), len(record.nodes))
            states.append(
                after_attribution(found.fault, faults, own=own, others=others, of_broad_set=broad)
            )
            told += others
            if own is not None and own.state != NodeStanding.SUSPECT:
                told.append(own)
        steps = list(NodeStanding)
        state = min(states, key=steps.index)
        if state is NodeStanding.SUSPECT:
            return found
        if state is NodeStanding.AVOID:
            why_not = self._exclusions.why_not_leave_out(last.nodes, self._observations.states)
            if why_not:
                self._say(f"{compress(last.nodes)} is suspected again and used on: {why_not}")
                return found
        return of_standing(found, last, before=before, state=state, known=told)

    def _repetition(self, record: LaunchRecord) -> Repetition:
        """How often in a row this fault came at this step, since a person last let go what was held
        for one.
        """
        last = NodeFault.of(self._job_id, record)
        earlier = attempts_before(self._context.directory.paths, self._job_id)
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
            return older_sound(self._paths, newest, self._config.resume_need)
        except (OSError, ValueError) as error:
            self._say(f"whether an older checkpoint can be tried cannot be told: {cause(error)}")
            return None

    def choose_checkpoint(self, record: LaunchRecord) -> None:
        """Let the next launch begin from the older checkpoint that is to be tried, or from the
        newest one again.
        """
        older = record.older_checkpoint
        newest = record.checkpoint_before
        repeated = self.repeated
        need = self._config.resume_need
        try:
            if older is not None:
                point_to(self._paths, older, self._job_id)
                why = (
                    f"launches that begin from step {newest} end at iteration {record.reached}, {repeated.times} times "
                    f"so far: the training goes on from the older checkpoint of step {older}"
                )
                self._say(f"{why}; step {newest} stays where it is")
                self._mitigation.note("older-checkpoint", why, {"doubted": newest, "step": older})
            elif repeated.tried_older and point_back(
                self._paths, newest, newest=repeated.newest_tried, need=need, job_id=self._job_id
            ):
                again = repeated.newest_tried
                why = f"the older checkpoint of step {newest} was no cure: step {again} is resumed from again"
                self._say(why)
                self._mitigation.note("older-checkpoint", why, {"step": again})
        except (OSError, ValueError) as error:
            self._say(f"the checkpoint to begin from cannot be chosen: {cause(error)}")


def ended_by(directory: RunDirectory) -> str:
    """Who asked for an end at once, without saving; "" where no one does."""
    request = read_request(directory.kill_switch, "kill")
    if request is not None and request.kind == "kill-now":
        return str(request)
    return ""


def concluded(record: LaunchRecord, found: Attribution) -> LaunchRecord:
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

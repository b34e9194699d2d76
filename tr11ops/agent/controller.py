"""The batch controller: runs the launches of one attempt, has each failure named, and carries out
what follows.

Between a launch and the next there is no pause. Nothing is decided here: see `attribution`,
`relaunch` and `breaker`.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from datetime import datetime

from msgspec.structs import replace

from tr11ops.agent.attempt_context import AttemptContext, AttemptObservations, JobEnd
from tr11ops.agent.breaker import (
    OUT_OF_TIME,
    checkpoint_before,
    has_trained_since,
    must_hold,
    read_burned,
    why_not_begin,
)
from tr11ops.agent.job_follower import of_dead_host, of_node_before
from tr11ops.agent.launching import Launches, ended_by
from tr11ops.agent.mitigation import (
    ConcurrentAttempt,
    Mitigation,
    concurrent_attempt,
    forbidding_verdict,
    switch_of,
)
from tr11ops.agent.recurrence import held_because, suspects_to_try_without
from tr11ops.agent.relaunch import (
    NOT_THE_NODES,
    Decision,
    EndTask,
    Relaunch,
    Stop,
    blamed_nodes,
    decide,
    first_nodes,
    named_twice,
)
from tr11ops.agent.restarts import waiting_start_before
from tr11ops.agent.step import LineTee, StopFlag
from tr11ops.agent.traces import logged_iteration, read_awaited, read_faults
from tr11ops.agent.workers import RealWorkers, Workers
from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import known, observed
from tr11ops.base.units import counted
from tr11ops.cluster.arrays import compress
from tr11ops.cluster.base import JobState, Scheduler
from tr11ops.diagnose.attribution.evidence import UNEXPLAINED, Attribution, Kind, awaited_node
from tr11ops.diagnose.attribution.records import read_ranks
from tr11ops.launch.margins import read_launches
from tr11ops.observe.lost_checkpoints import LOST, find_lost
from tr11ops.queue.queued_jobs import PendingJobs
from tr11ops.runcard.rules import SIGNAL_SLACK_SECONDS
from tr11ops.rundir.attempts import (
    ENDS_TASK,
    STARTS_AGAIN,
    STOPS,
    SUPERSEDED,
    AttemptVerdict,
    LaunchRecord,
    attempts_before,
    of_failure,
    of_marker,
    without_restart,
)
from tr11ops.rundir.exclusion import HANG
from trainer.contract.attempt import EndMarker, request_stop
from trainer.contract.paths import newest_step
from trainer.contract.requests import pause_of

ZOMBIE_LOOK_SECONDS = 5.0  # between two looks at the trainers of a job without its batch host
ZOMBIE_SECONDS = 600.0  # for them to save and leave; then this task gives way
REQUEUE_PAUSE_SECONDS = 120.0  # as Slurm's own after a requeue that is not expedited
SURE = 0.8  # from this confidence on, a blamed node is taken for the fault itself


class Controller:
    """One attempt. `run` is called once, and returns the batch script's exit status. `workers`: how
    they are run, where they are no processes of this machine's scheduler.
    """

    def __init__(
        self,
        context: AttemptContext,
        stop: StopFlag,
        tee: LineTee,
        workers: Workers | None = None,
    ) -> None:
        self._context = context
        self._config = context.config
        self._paths = context.config.paths
        self._job_id = context.job_id
        self._folder = context.folder
        self._stop = stop
        self._tee = tee
        self._say = tee.say
        self._observations = AttemptObservations(context, tee)
        waiting = None
        if context.scheduler is not None:
            waiting = PendingJobs(
                context.scheduler,
                context.directory,
                array_id=context.allocation.array_id,
                say=tee.line,
                give_up=lambda: len(stop.received) > 1,
            )
        self._mitigation = Mitigation(context, waiting, tee)
        self._exclusions = self._mitigation.exclusions
        self._launches = Launches(
            context,
            self._observations,
            self._mitigation,
            stop=stop,
            tee=tee,
            workers=workers or RealWorkers(context, stop, tee),
        )

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
        self._launches.follower.end_own_job()
        return status

    def _run_launches(self) -> int:
        left = self._leave_at_once()
        if left is not None:
            return left
        self._launches.follower.follow(())
        awaited: tuple[str, ...] = ()
        if self._context.swaps_nodes:
            self._exclusions.prepare()
            self._exclusions.take_back_left_out()
            awaited = self._suspect_of_hang_before()
            self._leave_out_lost_nodes()
            # one that ran without suspects may have been killed before it could say that it trained
            self._exclusions.step_up(
                [
                    entry
                    for entry in self._exclusions.trial()
                    if has_trained_since(self._context.directory, self._job_id, entry.job_id)
                ]
            )
        nodes = first_nodes(self._observations.situation())
        if nodes is None:
            return self._leave_for_want_of_nodes()
        for node in awaited:
            where = "a spare takes its place"
            if node in nodes:
                where = "no spare node is left for it"
            self._say(f"{node}, which the attempt before waited for, is only suspected: {where}")
        number = 0
        while True:
            number += 1
            record, marker, found = self._launches.run(number, nodes)
            left = self._leave_after(record, marker, found)
            if left is not None:
                return left
            decision = decide(
                self._launches.outcomes,
                self._launches.repeated,
                self._observations.situation(),
                self._config.resilience,
            )
            self._tell(record, found, decision)
            if isinstance(decision, Stop) and decision.why == NOT_THE_NODES:
                self._exclusions.clear_suspects(found.fault)
            self._launches.choose_checkpoint(record)
            if self._context.swaps_nodes:
                self._exclusions.exclude_nodes(found)
                self._exclusions.suspect(
                    replace(found, suspects=named_twice(self._launches.outcomes))
                )
            if not isinstance(decision, Relaunch) or self._stop.received:
                return self._give_up(found, decision)
            if self._stopping():
                return self._leave_for_switch()
            left = self._leave_for_lost_checkpoints()
            if left is not None:
                return left
            self._mitigation.queue_behind(self._job_id)
            nodes = decision.nodes

    def _leave_after(
        self, record: LaunchRecord, marker: EndMarker | None, found: Attribution
    ) -> int | None:
        """The exit status of an attempt whose last launch ended as it was to; None where it failed."""
        if marker is not None and (found.kind is Kind.OPERATOR or marker.reason == "refused"):
            return self._leave_by_marker(marker, found)
        if marker is None and found.kind is Kind.OPERATOR and ended_by(self._context.directory):
            return self._leave_for_switch()
        if self._launches.over is None:
            return self._leave_unexplained(marker, found)
        return self._leave_ended_job(record, found, self._launches.over)

    def _leave_unexplained(self, marker: EndMarker | None, found: Attribution) -> int | None:
        """The exit status after an end that nothing explains, and that has come again, or is not to
        be tried again; else None.
        """
        if marker is None or marker.reason != "unexplained":
            return None
        times = sum(outcome.fault == UNEXPLAINED for outcome in self._launches.outcomes)
        if marker.restart and times < 2:
            return None
        why = self._why_hold(marker)
        if times > 1:
            why = f"unexplained, and it came again: {marker.message}"
        verdict = self._with_history(of_marker(marker))
        verdict = replace(verdict, cause=found.kind.value, fault=found.fault)
        switch = switch_of(self._context.directory)
        return self._mitigation.finish(without_restart(verdict), hold=why, switch=switch)

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
            return self._leave_held(why, fault)
        left = self._leave_for_another()
        if left is not None:
            return left
        too_short = self._observations.too_short()
        if too_short:
            return self._leave_for_want_of_time(too_short)
        return self._leave_for_lost_checkpoints()

    def _leave_held(self, why: str, fault: str) -> int:
        verdict = replace(self._failed(why), fault=fault)
        return self._mitigation.finish(without_restart(verdict), hold=why)

    def _leave_for_lost_checkpoints(self) -> int | None:
        """The exit status of an attempt that would begin anew, though the run had saved something; None
        where it would not, or that is not known.
        """
        lost = known(observed(find_lost, self._config), None)
        if lost is None:
            return None
        self._say(str(lost))
        return self._leave_held(str(lost), LOST)

    def _why_hold_at_once(self) -> tuple[str, str]:
        """Why nothing of this run may start, and the fault, by how the attempts before have ended;
        "" when it may.
        """
        before = forbidding_verdict(self._context)
        if before is not None:
            return (
                f"attempt {self._context.label_of(before.job_id)} ended so that nothing may start: {before.message}",
                "",
            )
        burned = read_burned(self._context.directory, self._job_id, self._context.scheduler)
        why = why_not_begin(burned, self._config.resilience.most_tasks_per_fault)
        if why:
            return why, burned[0].fault
        return "", ""

    def _leave_for_another(self) -> int | None:
        """The exit status of an attempt beside which another one trains; None where none does."""
        ordering = self._context.ordering
        scheduler = self._context.scheduler
        if ordering is None or scheduler is None or self._context.allocation.array_id is None:
            return None
        other = self._attempt_beside(scheduler)
        if other is not None and other.is_zombie and other.seconds_to_wait:
            other = self._wait_for_trainers(other, scheduler)
        if other is None:
            return None
        if other.is_zombie and not other.seconds_to_wait:
            self._leave_out_dead_host(other)
            self._mitigation.cancel(other.job_id)
            self._mitigation.queue_behind(self._job_id)
            return None
        self._mitigation.queue_behind(other.job_id)
        trains = f"job {self._context.label_of(other.job_id)} of this array still trains"
        verdict = self._failed(f"{trains}: this task goes back into the queue")
        status = self._mitigation.finish(replace(verdict, reason=SUPERSEDED))
        self._wait_if_expedited(ordering)
        self._mitigation.give_back(ordering)
        return status

    def _attempt_beside(self, scheduler: Scheduler) -> ConcurrentAttempt | None:
        """The attempt that runs beside this one. A scheduler that is silent is asked again; where it stays
        silent, the run's lease keeps two trainers apart.
        """
        until = time.monotonic() + ZOMBIE_SECONDS
        while True:
            try:
                return concurrent_attempt(self._context, scheduler)
            except SchedulerError as error:
                if self._stop.received or time.monotonic() >= until:
                    self._say(f"whether another attempt runs is not known: {error}")
                    return None
            time.sleep(ZOMBIE_LOOK_SECONDS)

    def _wait_if_expedited(self, ordering: Scheduler) -> None:
        """Where Slurm would start this job again at once, the pause that it makes of itself else: the
        other one still trains.
        """
        try:
            job = ordering.job(self._job_id)
        except SchedulerError:
            return  # it cannot be put back now either
        if job is None or not job.is_expedited:
            return
        until = time.monotonic() + REQUEUE_PAUSE_SECONDS
        while time.monotonic() < until and not self._stop.received:
            time.sleep(1.0)

    def _suspect_of_hang_before(self) -> tuple[str, ...]:
        """Put on record which node of this allocation the attempt before waited for when it was ended:
        it is used after the others. No launch of its own has named it, since an order ended it.
        """
        folder, _ = next(
            attempts_before(self._context.directory.paths, self._job_id), (self._folder, None)
        )
        last = next(iter(read_launches((folder,))), None)
        if last is None or last.cause not in {"", Kind.OPERATOR}:
            return ()
        words = read_awaited(self._paths, folder.name, last, read_ranks(folder))
        nodes = awaited_node(words)
        said = tuple(word.said for word in words)
        summary = f"job {self._context.label_of(folder.name)} hung: {'; '.join(said)}"
        self._exclusions.suspect(
            Attribution(Kind.NODE, summary, 0.5, suspects=nodes, evidence=said, fault=HANG)
        )
        self._exclusions.wait()
        return tuple(node for node in nodes if node in self._context.allocation.nodes)

    def _leave_out_lost_nodes(self) -> None:
        """Exclude what is gone now of the nodes that a job had before Slurm ended it to start it again:
        this one, or the one just before, which waits.
        """
        context = self._context
        before = context.start_before or waiting_start_before(
            context.directory, self._job_id, context.scheduler
        )
        if before is None:
            return
        self._observations.look()
        for node in before.nodes:
            if self._observations.is_down(node):
                found = of_node_before(node, context.label_of(before.job_id))
                self._say(f"{found.evidence[0]}: it is excluded")
                self._exclusions.exclude_nodes(found)

    def _leave_out_dead_host(self, other: ConcurrentAttempt) -> None:
        """Exclude the batch host that another job has died of, where it is gone now: that job's own
        controller, which would have done it, died with it.
        """
        if not other.gone_host or not self._context.swaps_nodes:
            return
        self._exclusions.prepare()
        self._exclusions.exclude_nodes(
            of_dead_host(other.gone_host, self._context.label_of(other.job_id)), other.job_id
        )

    def _wait_for_trainers(
        self, other: ConcurrentAttempt, scheduler: Scheduler
    ) -> ConcurrentAttempt | None:
        """Trainers live in a job that has lost its batch host: ask them to save and leave, and wait
        until they have.
        """
        lost = f"job {self._context.label_of(other.job_id)} has lost its batch host"
        self._say(f"{lost}, its trainers may live: they shall save and leave")
        try:
            who = f"job {self._context.allocation.label}, which goes on in its place"
            request_stop(self._paths.stop_request(other.job_id), who)
        except OSError as error:
            self._say(f"they cannot be asked: {error}")
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
            with suppress(SchedulerError):  # who is silent does not say that they are gone
                found = concurrent_attempt(self._context, scheduler)
        return found

    # ------------------------------------------------------------------ what happened

    # ------------------------------------------------------------------ ends of the job itself
    def _leave_ended_job(self, record: LaunchRecord, found: Attribution, over: JobEnd) -> int:
        """The job is over, though this process lives: start nothing more in it, and see that it
        ends.
        """
        self._tell(record, found, EndTask(f"{over.why}: nothing more is started in it"))
        if over.state is JobState.RUNNING:
            self._exclusions.exclude_nodes(found)
            self._mitigation.wait()
        saved = newest_step(self._paths) or 0  # what was trained since is lost
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
        job = self._observations.job_time()
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
        left = self._observations.seconds_to_limit()
        early = self._config.slurm.signal_seconds_before_limit
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

    def _leave_for_switch(self) -> int:
        """A stop switch is set: leave without starting a worker, and let no other task start only
        to do the same.
        """
        reason = self._stopping()
        what, path = "pause", self._paths.pause
        if reason == "kill-switch":
            what, path = "kill switch", self._context.directory.kill_switch
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        line = f"[Detected {what} at {path}. Exiting] datetime: {stamp} "
        self._tee.line(line)
        marker = self._leave_marker(reason, line.strip())
        verdict = self._with_history(of_marker(marker))
        return self._mitigation.finish(
            verdict, hold=self._why_hold(marker), switch=switch_of(self._context.directory)
        )

    def _leave_marker(self, reason: str, message: str) -> EndMarker:
        """The end marker of an attempt of which no trainer can leave one."""
        return self._launches.leave_marker(len(self._launches.outcomes), reason, message)

    def _why_hold(self, marker: EndMarker) -> str:
        """Why the queued jobs must not start after this end; "" when it should."""
        switch = switch_of(self._context.directory)
        if switch == "kill-switch":
            return "the kill switch is set"
        if switch:
            return "the run is paused"
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
        self._say(
            f"job {self._context.allocation.label} could not start ({found.kind}): {found.summary}"
        )
        data = {
            "cause": found.kind.value,
            "blamed": list(found.blamed),
            "evidence": list(found.evidence),
        }
        self._mitigation.note("start-failed", found.summary, data)
        if self._context.swaps_nodes and found.blamed:
            self._exclusions.prepare()
            self._exclusions.exclude_nodes(found)
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
        usable = self._observations.situation().usable
        barred = [node for node in self._context.allocation.nodes if node not in usable]
        left = counted(len(usable), "node is", "nodes are")
        why = f"{compress(barred)} of this allocation may not be used, and {left} too few"
        self._exclusions.refresh()
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
        if found.fault == UNEXPLAINED:
            verdict = replace(verdict, reason="unexplained")
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
            why = self._exclusions.why_left_in_use()
        begins_elsewhere = (
            bool(self._launches.outcomes)
            and self._launches.outcomes[-1].older_checkpoint is not None
        )
        if not why and not verdict.progress and not begins_elsewhere:
            burned = read_burned(self._context.directory, self._job_id, self._context.scheduler)
            why = must_hold(verdict.fault, burned, self._config.resilience.most_tasks_per_fault)
            if why and self._tries_without_suspects(verdict):
                why = ""
        if why and not switch:
            verdict = without_restart(verdict)
        return self._mitigation.finish(verdict, hold=why, switch=switch)

    def _tries_without_suspects(self, verdict: AttemptVerdict) -> bool:
        """Whether the next task runs without the nodes that may be at fault, before anything is
        held for this fault.

        One such task tells: where it fails the same way, it is not the nodes. Only while enough
        others are free.
        """
        may_be_a_nodes = verdict.cause in {Kind.NODE.value, Kind.UNKNOWN.value}
        if not self._context.swaps_nodes or not may_be_a_nodes or self._exclusions.trial():
            return False
        burned = read_burned(self._context.directory, self._job_id, self._context.scheduler)
        folders = [self._folder, *(self._paths.attempt(one.job_id) for one in burned)]
        suspects = suspects_to_try_without(read_faults(folders), verdict.fault)
        if not suspects:
            return False
        self._observations.look()
        why_not = self._exclusions.why_not_leave_out(suspects, self._observations.states)
        if why_not:
            self._say(
                f"no task can be tried without {compress(suspects)}, which may be at fault: {why_not}"
            )
            return False
        return self._exclusions.try_without(suspects, verdict.fault, verdict.message)

    def _switch_hold(self) -> str:
        switch = switch_of(self._context.directory)
        if switch:
            return f"{switch} is set"
        return ""

    def _failed(self, message: str) -> AttemptVerdict:
        verdict = of_failure(message, logged_iteration(self._paths), newest_step(self._paths))
        return self._with_history(verdict)

    def _with_history(self, verdict: AttemptVerdict) -> AttemptVerdict:
        return replace(
            verdict,
            launches=len(self._launches.outcomes),
            progress=any(outcome.has_progress for outcome in self._launches.outcomes),
            blamed=blamed_nodes(self._launches.outcomes),
        )

    # ------------------------------------------------------------------ words
    def _tell(self, record: LaunchRecord, found: Attribution, decision: Decision) -> None:
        what = {"Relaunch": STARTS_AGAIN, "EndTask": ENDS_TASK, "Stop": STOPS}
        line = f"{what[type(decision).__name__]}: {decision.why}"
        self._say(f"launch {record.launch} failed ({found.kind}): {found.summary}")
        self._say(line)
        is_last = not isinstance(decision, Relaunch)
        self._launches.write(replace(record, decision=line, is_last=is_last))
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

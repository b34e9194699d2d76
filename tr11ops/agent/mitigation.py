"""What a failing attempt does about its fault: excludes bad nodes, holds the queued jobs, writes
its verdict.

Whatever asks the scheduler is done beside the launches, one thing after another, so that no launch
waits for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.agent.breaker import attempts_before
from tr11ops.agent.recurrence import FailingCheck, NodeFault, acquitted, innocent
from tr11ops.agent.step import LineTee
from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import cause
from tr11ops.base.units import counted
from tr11ops.cluster.base import JobState, Scheduler
from tr11ops.cluster.hostlist import compress
from tr11ops.diagnose.attribution.evidence import Attribution, Kind
from tr11ops.nodes.names import card_exclusions
from tr11ops.nodes.queue_exclusions import (
    ExclusionResult,
    RunQueue,
    exclude_nodes,
    include_nodes,
    sync_queue_exclusions,
    why_not_leave_out,
)
from tr11ops.observe.files import read_details
from tr11ops.observe.look import facts_of, observe
from tr11ops.observe.lost_host import gone_host, has_lost_its_host, seconds_to_wait
from tr11ops.queue.queued_jobs import Ordering, PendingChanges, PendingJobs, known_names
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.attempts import SUPERSEDED, AttemptVerdict
from tr11ops.rundir.exclusion import (
    NOT_EXCLUDABLE,
    Exclusion,
    ExclusionLimit,
    NodeStanding,
    after_good_use,
    family,
    is_trial,
    way_past,
)
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, Version, publish, read_version, revise
from tr11ops.rundir.hold_store import forget_holds, record_holds
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory, Submission
from trainer.contract.end_marker import EXIT_FINE
from trainer.contract.paths import read_attempt_label
from trainer.contract.record import Record


class ActingAttempt(Record):
    """The attempt that acts. `partition` is the scheduler's name of where it runs, "" where it does
    not say. `number` is its own as people type it, "" where only its record has it.
    """

    config: RunCard
    directory: RunDirectory
    job_id: str
    submission: str
    partition: str = ""
    nodes: tuple[str, ...] = ()  # of its allocation
    number: str = ""

    @property
    def folder(self) -> Path:
        return self.config.paths.attempt(self.job_id)

    @property
    def label(self) -> str:
        """The attempt's number as people see and type it."""
        # its record is away with the run directory
        return self.number or self.label_of(self.job_id)

    def label_of(self, job_id: str) -> str:
        """The number of an attempt of this run, as people see and type it."""
        return read_attempt_label(self.config.paths, job_id)


class Mitigation:
    """The effects of one attempt on the run's other work. `scheduler` and `waiting` are None in the
    foreground.
    """

    def __init__(
        self,
        attempt: ActingAttempt,
        scheduler: Scheduler | None,
        waiting: PendingJobs | None,
        tee: LineTee,
    ) -> None:
        self._attempt = attempt
        self._scheduler = scheduler
        self._waiting = waiting
        self._tee = tee
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mitigation")
        # a hold that the scheduler refuses is tried for minutes: no exclusion waits behind it
        self._exclusions = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exclusions")
        self._pending: list[Future[object]] = []
        self._held: Future[PendingChanges] | None = None
        # how many nodes may be excluded; one where it is not known how many there are
        self._limit = ExclusionLimit(1)
        self._limit_words: set[str] = set()  # of every limit that has refused one
        self.refused: list[tuple[str, str]] = []  # bad nodes that are not excluded, and why not

    # ------------------------------------------------------------------ nodes
    def exclude_nodes(self, found: Attribution) -> None:
        """Begin to exclude the blamed nodes from this run: on its list, and in its queued jobs;
        what is only suspected goes on record, and is left out too where it is to be avoided.
        """
        if found.blamed:
            self._on_list(self._exclude, found)
        elif found.avoided:
            self._on_list(self._avoid, found)
        elif found.kind is Kind.NODE:
            self.suspect(found)

    def suspect(self, found: Attribution) -> None:
        """Begin to put suspects on record: they are used on, after the others."""
        if found.suspects:
            self._on_list(self._suspect, found)

    def _avoid(self, found: Attribution) -> None:
        self._ask_limit()
        done = self._leave_out(
            found.avoided,
            NodeStanding.AVOID,
            fault=found.fault,
            why=found.summary,
            evidence=found.evidence,
        )
        for node in done.nodes:
            self._tee.line(f"tr11: {node} is avoided while enough others are free: {found.summary}")
        for node, fault in done.refused:
            self._tee.line(f"tr11: {node} is not avoided: {fault}")

    def _leave_out(
        self,
        nodes: Sequence[str],
        state: NodeStanding,
        fault: str,
        why: str,
        evidence: Sequence[str],
    ) -> ExclusionResult:
        self._limit_words.add(str(self._limit))
        done = exclude_nodes(
            self._attempt.directory,
            nodes,
            self._queue(),
            why=why,
            owner=AUTOMATIC_OWNER,
            evidence=tuple(evidence),
            days=self._attempt.config.resilience.exclusion_days,
            job_id=self._attempt.job_id,
            limit=self._limit,
            state=state,
            fault=family(fault),
        )
        self._tell(done)
        return done

    def _suspect(self, found: Attribution) -> None:
        """The newest suspicion of a node is the one on record; an exclusion stays."""
        now, fault = time.time(), family(found.fault)

        def change(version: Version) -> Version:
            for node in found.suspects:
                if version.find(node) is None:
                    fresh = Exclusion(
                        node,
                        found.summary,
                        owner=AUTOMATIC_OWNER,
                        until=None,
                        evidence=found.evidence,
                        since=now,
                        job_id=self._attempt.job_id,
                        state=NodeStanding.SUSPECT.value,
                        fault=fault,
                    )
                    others = version.without(node)
                    version = replace(others, suspects=(*others.suspects, fresh))
            return version

        self._revise(change)

    def _revise(self, change: Callable[[Version], Version]) -> None:
        try:
            revise(self._attempt.directory, change)
        except (OSError, ValueError) as error:
            self._tee.line(
                f"tr11: what is suspected of nodes cannot be put on record: {cause(error)}"
            )

    def note_good_use(self, nodes: Sequence[str], seconds: float) -> None:
        """Begin to put on record that nodes have trained well: it clears suspects, and takes the
        others a step back.
        """
        self._on_list(self._note_good_use, nodes, seconds)

    def _note_good_use(self, nodes: Sequence[str], seconds: float) -> None:
        listed = self._listed("good use of nodes cannot be put on record")
        back = [entry.node for entry in listed if _is_trusted_again(entry, nodes, seconds)]
        if back:
            self._give_back(back, "it has trained well: a suspect again", then=NodeStanding.SUSPECT)
        self._revise(
            lambda version: _after_use(
                version, [node for node in nodes if node not in back], seconds
            )
        )

    def why_not_leave_out(
        self, nodes: Sequence[str], states: Mapping[str, frozenset[str]] | None
    ) -> str:
        """Why nodes that are only suspected cannot be left out now; "" where they can. `states`: of
        all nodes.
        """
        self._exclusions.submit(self._ask_limit).exception()
        listed = [entry.node for entry in self._listed("nodes cannot be left out")]
        return why_not_leave_out(
            nodes, listed, limit=self._limit, states=states, own=self._attempt.nodes
        )

    def try_without(
        self, nodes: Sequence[str], fault: str, why: str, evidence: Sequence[str]
    ) -> bool:
        """Leave suspects out of the next task, which tells whether they are at fault; whether it
        runs without them.
        """
        done = self._leave_out(nodes, NodeStanding.SUSPECT, fault=fault, why=why, evidence=evidence)
        if not done.refused and not done.failed and done.unread is None:
            self._tee.line(
                f"tr11: the next task runs without {compress(nodes)}, to tell whether it is the nodes: {why}"
            )
            return True
        self.end_trial("the next task could not be kept off them", done.nodes)
        return False

    def end_trial(self, why: str, nodes: Sequence[str]) -> None:
        """Use nodes again that were left out for one try, with nothing on record against them."""
        if nodes:
            back = [entry for entry in self._listed() if entry.node in nodes and is_trial(entry)]
            self._include(back, why)

    def step_up(self, tried: Sequence[Exclusion], why: str) -> None:
        """Begin to avoid the nodes without which the training went on."""
        self._on_list(self._step_up, tried, why)

    def _step_up(self, tried: Sequence[Exclusion], why: str) -> None:
        self._ask_limit()
        for entry in tried:
            self._leave_out(
                (entry.node,), NodeStanding.AVOID, fault=entry.fault, why=why, evidence=()
            )
            self._tee.line(f"tr11: {entry.node} is avoided while enough others are free: {why}")

    def trial(self) -> tuple[Exclusion, ...]:
        """The nodes that this task runs without, to tell whether they are at fault."""
        return tuple(
            entry
            for entry in self._listed("whether suspects are left out is not known")
            if is_trial(entry)
        )

    def _make_room(self, nodes: Sequence[str], limit: ExclusionLimit) -> None:
        """Use nodes again that are only avoided, where the cap has no room for these, which are
        surely bad.
        """
        listed = self._listed("room on the list cannot be made")
        avoided = [
            entry
            for entry in listed
            if entry.state == NodeStanding.AVOID and entry.node not in nodes
        ]
        avoided.sort(key=lambda entry: entry.since or 0.0)
        left = {entry.node for entry in listed}
        back: list[str] = []
        while avoided and limit.forbids(nodes, left):
            back.append(avoided.pop(0).node)
            left.discard(back[-1])
        if back and not limit.forbids(nodes, left):
            why = f"the cap has room for one that is surely bad alone: {', '.join(nodes)}"
            for node in self._give_back(back, why, then=NodeStanding.SUSPECT).nodes:
                self._tee.line(f"tr11: {node} is not avoided any more: {why}")

    def _exclude(self, found: Attribution) -> None:
        days = counted(self._attempt.config.resilience.exclusion_days, "day")
        self._ask_limit()
        self._make_room(found.blamed, self._limit)
        done = self._leave_out(
            found.blamed, NodeStanding.EXCLUDE, "", found.summary, evidence=found.evidence
        )
        for node in done.nodes:
            self._tee.line(f"tr11: {node} is excluded for {days}: {found.summary}")
        for node, fault in done.refused:
            self.refused.append((node, fault))
            past = ""
            if fault in self._limit_words:
                past = f"; to exclude {node} all the same: `{way_past(node)}`"
            self._tee.line(f"tr11: {node} is not excluded: {fault}{past}")

    def why_left_in_use(self) -> str:
        """Which bad nodes could not be excluded and are not on the run's list now, and why; ""
        where none is.

        A person may have excluded one since. Where the list cannot be read, all of them are named.
        """
        if not self.refused:
            return ""
        listed = {
            entry.node
            for entry in self._listed("whether a bad node was excluded since is not known")
        }
        left = {node: fault for node, fault in self.refused if node not in listed}
        if not left:
            return ""
        return f"{compress(left)}{NOT_EXCLUDABLE}{next(iter(left.values()))}"

    def refresh(self) -> None:
        """Put the run's list, and nothing else, on the exclude lists of the queued jobs."""
        queue = self._queue()
        if queue is not None:
            self._tell(sync_queue_exclusions(self._attempt.directory, queue))

    def take_back(self, others: Sequence[NodeFault], why: str) -> None:
        """Begin to end the automatic exclusions that rest on these faults: on the run's list, in
        the queued jobs; and the suspicions.
        """
        self._on_list(lambda: self._include(innocent(self._listed(), AUTOMATIC_OWNER, others), why))
        cleared = {
            (node, family(one.fault)) for one in others for node in (*one.nodes, *one.may_be)
        }

        def change(version: Version) -> Version:
            left = tuple(
                entry for entry in version.suspects if (entry.node, entry.fault) not in cleared
            )
            return replace(version, suspects=left)

        self._on_list(self._revise, change)

    def clear_suspects(self, fault: str) -> None:
        """Begin to end the suspicions that rest on a fault which proved to be no node's."""
        kind = family(fault)

        def change(version: Version) -> Version:
            return replace(
                version, suspects=tuple(entry for entry in version.suspects if entry.fault != kind)
            )

        self._on_list(self._revise, change)

    def take_back_of_checks(self, checks: Sequence[FailingCheck], why: str) -> None:
        """Begin to end the automatic exclusions that rest on health checks which fail everywhere."""
        self._on_list(
            lambda: self._include(acquitted(self._listed(), AUTOMATIC_OWNER, checks), why)
        )

    def _listed(self, without: str = "exclusions cannot be taken back") -> tuple[Exclusion, ...]:
        """The run's list; empty where it cannot be read, and the log says what is not done
        `without` it.
        """
        try:
            return read_version(self._attempt.directory.exclusions).exclusions
        except (OSError, ValueError) as error:
            self._tee.line(f"tr11: {without}, the run's list cannot be read: {cause(error)}")
            return ()

    def _give_back(
        self, nodes: Sequence[str], why: str, *, then: NodeStanding | None = None
    ) -> ExclusionResult:
        """Take nodes off the list; as what they stay on record: `then`."""
        done = include_nodes(
            self._attempt.directory, nodes, self._queue(), why=why, owner=AUTOMATIC_OWNER, then=then
        )
        self._tell(done)
        return done

    def _include(self, entries: Sequence[Exclusion], why: str) -> None:
        done = self._give_back([entry.node for entry in entries], why)
        for node in done.nodes:
            self._tee.line(f"tr11: {node} is not excluded any more: {why}")
        for node, fault in done.refused:
            self._tee.line(f"tr11: {node} stays excluded: {fault}")

    def _queue(self) -> RunQueue | None:
        """The run's queued jobs, asked for as long as a silent scheduler may come back."""
        waiting = self._waiting
        if waiting is None:
            return None
        return RunQueue(
            waiting.scheduler,
            waiting.look,
            lambda: known_names(waiting.scheduler),
            kept=card_exclusions(self._attempt.config),
            retry=waiting.retry,
        )

    def _tell(self, done: ExclusionResult) -> None:
        if done.left_out:
            gone = (
                f"{compress(done.left_out)}: unknown to the scheduler, left out of what it is given"
            )
            self._tee.line(f"tr11: {gone}; on the run's list it stays")
        for change in done.changes:
            added, removed = (
                set(change.after) - set(change.before),
                set(change.before) - set(change.after),
            )
            if added:
                words = [f"will not use {compress(added)}"]
            else:
                words = []
            words += [f"may use {compress(removed)} again"] if removed else []
            self._tee.line(f"tr11: queued job {change.job_id} {' and '.join(words)}")
        for line in done.failed:
            self._tee.line(f"tr11: {line}")
        if done.unread is not None:
            self._tee.line(f"tr11: the queued jobs keep their exclude lists: {cause(done.unread)}")

    def prepare(self) -> None:
        """Ask now what the scheduler may be too dead to say later: how many nodes there are."""
        self._on_list(self._ask_limit)

    def _ask_limit(self) -> None:
        """How many nodes may be excluded as things are now; as they were before, where the
        scheduler does not say.
        """
        if self._scheduler is None:
            return
        try:
            nodes = self._scheduler.nodes()
            if self._waiting is not None:
                queued = self._waiting.look()
            else:
                queued = ()
        except SchedulerError as error:
            self._tee.line(
                f"tr11: the scheduler does not tell how many nodes may be excluded: {error}"
            )
            return
        card = self._attempt.config
        limit = ExclusionLimit.of_run(
            nodes,
            queued,
            partitions=(card.slurm.partition, self._attempt.partition),
            allocated=card.slurm.allocated_nodes,
            percent=card.resilience.exclusion_cap_percent,
        )
        if limit.names:
            self._limit = limit
        else:
            self._limit = ExclusionLimit(1)

    # ------------------------------------------------------------------ the queued jobs
    def hold(self, switch: str = "") -> None:
        """Begin to hold all of the run's queued jobs, once. What is held for a switch is put on
        record at once.
        """
        if self._waiting is not None and self._held is None:
            waiting = self._waiting
            self._held = self._beside.submit(lambda: self._hold(waiting, switch))

    def _hold(self, waiting: PendingJobs, switch: str) -> PendingChanges:
        held = waiting.hold()
        if switch and held.changed:
            is_recorded = self._on_record(
                lambda: record_holds(
                    self._attempt.directory,
                    held.changed,
                    who=AUTOMATIC_OWNER,
                    why=switch,
                    switch=switch,
                )
            )
            if not is_recorded:
                self._mark(held.changed, switch, is_for_fault=False)
        return held

    def _on_record(self, change: Callable[[], None]) -> bool:
        """Write a record; whether it is in the run directory, and not in an empty one that hides
        it.
        """
        try:
            change()
        except OSError as error:
            self._tee.line(f"tr11: what is held could not be put on record: {error}")
            return False
        return (self._attempt.folder / "attempt.json").exists()

    def _mark(self, held: tuple[str, ...], why: str, is_for_fault: bool) -> None:
        """Leave word of a hold with the held jobs, where the run directory has none of it."""
        if self._waiting is None or not held:
            return
        try:
            self._waiting.mark_held(held, why, is_for_fault)
            where = "who holds it, and why, is in the comment of"
        except SchedulerError as error:
            where = f"no record remains ({error}); release by hand what is held of"
        self._tee.line(
            f"tr11: the run directory is away or cannot be written: {where} job {', '.join(held)}"
        )

    def has_longer(self, seconds: float) -> bool:
        """Whether any of the queued jobs has a limit beyond these seconds; an unknown queue has
        none.
        """
        if self._waiting is None:
            return False
        try:
            queued = self._waiting.retry(self._waiting.look)
        except SchedulerError as error:
            self._tee.line(f"tr11: the limits of the queued jobs are not known: {error}")
            return False
        return any(
            job.time_limit_seconds is None or job.time_limit_seconds > seconds for job in queued
        )

    def queue_behind(self, ordering: Ordering, job_id: str) -> None:
        """Begin to make the array's other tasks wait for the end of job `job_id`."""
        if self._waiting is not None:
            waiting = self._waiting
            self._later(lambda: waiting.run_after(ordering, job_id))

    def cancel(self, job_id: str) -> None:
        """End a job that nothing works in any more."""
        self._later(lambda: self._cancel(job_id))

    def _cancel(self, job_id: str) -> None:
        if self._scheduler is None:
            return
        label = self._attempt.label_of(job_id)
        try:
            self._scheduler.cancel(label)  # its number may be the whole array's
            self._tee.line(f"tr11: job {label} had lost its batch host: cancelled")
        except SchedulerError as error:
            self._tee.line(
                f"tr11: job {label} has lost its batch host and cannot be cancelled: {error}"
            )

    def give_back(self, ordering: Ordering) -> None:
        """Put this very task back into the queue, and wait to be ended: it has done nothing, and is
        not used up.
        """
        job_id = self._attempt.job_id
        try:
            ordering.requeue(job_id)
        except SchedulerError as error:
            words = "cannot be put back into the queue: its task is used up"
            self._tee.line(f"tr11: job {self._attempt.label} {words}: {error}")

    def release(self) -> None:
        """Undo `hold`: its reason has gone."""
        if self._waiting is not None and self._held is not None:
            waiting, held = self._waiting, self._held
            self._held = None
            self._later(lambda: self._release(waiting, held.result().changed))

    def _release(self, waiting: PendingJobs, numbers: tuple[str, ...]) -> None:
        done = waiting.release(numbers)
        # the rest is for `tr11 resume`, which goes by the record
        gone = numbers if done.complete else done.numbers
        self._on_record(lambda: forget_holds(self._attempt.directory, gone))

    def note(self, kind: str, why: str, data: dict[str, Any]) -> None:
        """Write to the journal, beside. One that cannot be written is said, and stops nothing."""
        self._later(lambda: self._note(kind, why, data))

    def _note(self, kind: str, why: str, data: dict[str, Any]) -> None:
        try:
            Journal(self._attempt.directory.journal).write(
                kind, why, {"job_id": self._attempt.job_id, **data}, AUTOMATIC_OWNER
            )
        except OSError as error:
            self._tee.line(f"tr11: the journal cannot be written: {error}")

    def _later(self, action: Callable[[], object]) -> None:
        self._pending.append(self._beside.submit(action))

    def _on_list(self, action: Callable[..., object], *given: object) -> None:
        """Begin a change of the run's list, after those that were begun before."""
        self._pending.append(self._exclusions.submit(action, *given))

    def wait(self) -> None:
        """Wait for everything that was begun. A bug in it must not hide how the attempt ended."""
        for future in self._pending:
            error = future.exception()
            if error is not None:
                self._tee.line(
                    f"tr11: {type(error).__name__} while the fault was dealt with: {error}"
                )
        self._pending.clear()

    # ------------------------------------------------------------------ the end
    def finish(self, verdict: AttemptVerdict, hold: str = "", switch: str = "") -> int:
        """Hold the queued jobs if `hold` says why, write the verdict, and return the batch script's
        exit status.

        `switch`: the kill switch or pause for which alone it is held; nothing speaks against going
        on without that.
        """
        self.wait()
        if hold:
            verdict = self._finish_hold(verdict, hold, switch)
        verdict = replace(
            verdict,
            job_id=self._attempt.job_id,
            submission=self._attempt.submission,
            time=time.time(),
        )
        if not self._write(verdict):
            self._mark(verdict.held, verdict.held_because, is_for_fault=not switch)
        saved = ""
        if verdict.checkpoint_step is not None:
            saved = f", checkpoint {verdict.checkpoint_step}"
        where = ""
        if verdict.iteration is not None:
            where = f" at iteration {verdict.iteration}{saved}"
        detail = ""
        if verdict.exit_status != EXIT_FINE:
            detail = f": {verdict.message}"
        self._tee.line(
            f"tr11: attempt {self._attempt.label} ended: {verdict.reason}{where}{detail}"
        )
        self.wait()
        untold = publish(self._attempt.config.resilience.shared_exclusions, self._attempt.directory)
        if untold:
            self._tee.line(f"tr11: {untold}")
        for thread in (self._beside, self._exclusions):
            thread.shutdown()
        return verdict.exit_status

    def _write(self, verdict: AttemptVerdict) -> bool:
        """Whether the verdict is on record, where a later look finds it."""
        is_there = (self._attempt.folder / "attempt.json").exists()
        try:
            verdict.write(self._attempt.folder)
        except OSError as error:
            self._tee.line(f"tr11: the verdict could not be recorded: {error}")
            return False
        return is_there

    def _finish_hold(self, verdict: AttemptVerdict, why: str, switch: str) -> AttemptVerdict:
        self.hold(switch)
        held: tuple[str, ...] = ()
        complete = True
        if self._held is not None:
            error = self._held.exception()
            if error is not None:
                changes = PendingChanges((), (), False)
            else:
                changes = self._held.result()
            # what was held before is no one's to release after a switch; after a fault nothing of
            # it may start either
            held, complete = changes.changed if switch else changes.numbers, changes.complete
            if error is not None:
                self._tee.line(
                    f"tr11: {type(error).__name__} while the waiting tasks were held: {error}"
                )
        if verdict.exit_status != EXIT_FINE and held:
            self._tee.line(
                f"tr11: ALERT: job {', '.join(held)} is held, nothing trains: {why} (runbook: array-held)"
            )
        if not complete:
            self._tee.line(
                "tr11: not all that waits could be held: the next task will not train either"
            )
        if held or not complete:
            data = {
                "jobs": list(held),
                "complete": complete,
                "cause": verdict.cause,
                "fault": verdict.fault,
            }
            self._note("array-held", why, data)
        restart = verdict.restart and bool(switch)
        return replace(
            verdict,
            restart=restart,
            held=held,
            hold_failed=not complete,
            held_because=why,
            held_for=switch,
        )


def _is_trusted_again(entry: Exclusion, nodes: Sequence[str], seconds: float) -> bool:
    """Whether a node on the list is off it after so much more good training."""
    if entry.node in nodes:
        better = after_good_use(entry, seconds)
    else:
        better = entry
    return better is None or better.state != entry.state


def _after_use(version: Version, nodes: Sequence[str], seconds: float) -> Version:
    """What is on record after these nodes have trained well for so long; none leaves the list here."""
    exclusions = [
        after_good_use(entry, seconds) if entry.node in nodes else entry
        for entry in version.exclusions
    ]
    suspects = [
        after_good_use(entry, seconds) if entry.node in nodes else entry
        for entry in version.suspects
    ]
    return replace(
        version,
        exclusions=tuple(entry for entry in exclusions if entry is not None),
        suspects=tuple(entry for entry in suspects if entry is not None),
    )


def forbidding_verdict(attempt: ActingAttempt) -> AttemptVerdict | None:
    """The verdict of the attempt before, if it wanted this one held and could not do it; else None.

    It speaks for what waited then: not for a submission made later, nor where a person has released
    what was held.
    """
    for _, verdict in attempts_before(attempt.directory, attempt.job_id):
        if verdict is None or verdict.reason == SUPERSEDED:
            continue
        if not verdict.hold_failed:
            return None
        try:
            record = Submission.read(attempt.directory.submission(attempt.submission).record)
        except (OSError, ValueError):
            record = None
        if record is None or record.time < verdict.time:
            return verdict
        return None
    return None


class ConcurrentAttempt(Record):
    """Another attempt of the same submission, whose job still runs.

    `is_zombie`: it has lost its batch host. `seconds_to_wait`: how much longer its trainers must be
    silent before they count as gone, 0 when they do. `gone_host`: its batch host, where the
    scheduler says now that it is gone; else "".
    """

    job_id: str
    is_zombie: bool
    seconds_to_wait: float
    gone_host: str = ""


def concurrent_attempt(attempt: ActingAttempt, scheduler: Scheduler) -> ConcurrentAttempt | None:
    """The attempt that runs beside this one; None when there is none to be seen.

    A job that lives on without a dead node counts as ended for its array (Slurm 22.05), so the next
    task starts. If the dead node was the batch host, no script ends the job any more, and it holds
    its other nodes for ever; its trainers may live on.
    """
    for folder, verdict in attempts_before(attempt.directory, attempt.job_id):
        if verdict is not None and verdict.reason == SUPERSEDED:
            continue
        record = read_details(folder / "attempt.json")
        if verdict is not None or record.get("submission") != attempt.submission:
            return None
        try:
            job = scheduler.job(folder.name)
        except SchedulerError:
            return None
        if job is not None and job.state is JobState.RUNNING:
            seen = observe(attempt.directory, facts_of(attempt.config), scheduler, time.time())
            return ConcurrentAttempt(
                folder.name,
                has_lost_its_host(seen, job),
                seconds_to_wait(seen, job),
                gone_host(seen, job),
            )
    return None


def switch_of(directory: RunDirectory) -> str:
    """What stops everything of this run that waits: "kill-switch", "pause", or ""."""
    if directory.kill_switch_is_set():
        return "kill-switch"
    if os.path.lexists(directory.paths.pause):
        return "pause"
    return ""

"""One pass of the watchdog: look, judge, tell, and act where that is allowed.

    observe -> detect -> judge -> the run's log and alerts -> policy -> apply

What is told comes before what is done, so that a pass that is killed while it acts has told. A pass
that acts takes its turn first and looks then: what it acts on is never older than what another
watchdog did.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.agent.mitigation import switch_of
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.service import AlertInput, AlertOutcome, process
from tr11ops.alerts.situation import RunSituation
from tr11ops.base.observed import Observed, Unknown, cause, known, observed
from tr11ops.base.units import duration
from tr11ops.detect.detector import Finding
from tr11ops.detect.registry import detect_all, unjudged_detectors
from tr11ops.observe.jobs import look_for_directory
from tr11ops.observe.look import facts_of, look_now, observe
from tr11ops.observe.snapshot import RunFacts, Snapshot
from tr11ops.observe.training_files import read_stacks
from tr11ops.runcard.card import CardError, RunCard
from tr11ops.rundir.action_log import DAY_SECONDS, KEPT_SECONDS, ActionHistory, ActionRecord, replay
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, publish
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.rundir.journal import Journal, Ledger, read_journal
from tr11ops.rundir.journal_heads import lost_heads, next_heads, read_heads, words_of, write_heads
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.state_files import set_damage_aside
from tr11ops.watchdog.actions import Plan
from tr11ops.watchdog.apply import Done, RunEffects, as_it_would_go, carry_out, settle
from tr11ops.watchdog.bring_back import bring_back
from tr11ops.watchdog.context import read_policy_context
from tr11ops.watchdog.log_lines import Remark, State, lines, remarks, state_of, without_told_alert
from tr11ops.watchdog.policy import plan
from tr11ops.watchdog.repairs import note_out_of_service, out_of_service
from tr11ops.watchdog.rules import progress
from tr11ops.watchdog.since import held_verdict
from tr11ops.watchdog.situation import condition_of, situation_of
from tr11ops.watchdog.stacks import hanging_jobs, take_missing_stacks
from tr11ops.watchdog.verdict import Verdict, judge, seen_something, with_what_resumes
from trainer.contract.files import append_line, refresh
from trainer.contract.lease import KEPT_CLAIMS, LeaseClaim, LeaseFolder
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.state_file import read_bytes, tail_lines

if TYPE_CHECKING:
    from tr11ops.cluster.base import Scheduler
    from tr11ops.launch.session import LaunchJob


# Whose turn it is to act: of all watchdogs of a run, on any number of machines, one at a time.
#
#     state/acting/N.json    the claim of turn N, as in trainer/contract/lease.py: who, where, and whether it is over
#
# A turn that was not given back is over after `STALE_SECONDS`, by the file server's clock alone;
# who slept through that finds out before its next effect.

FOLDER = "acting"
# beyond the longest pass: a launch against a controller that is frozen all the while
STALE_SECONDS = 900.0
_TAIL_BYTES = 64
LOG_TAIL_BYTES = 1 << 16


class WatchdogLock(Record):
    """A turn that is ours: `epoch` is its number."""

    folder: LeaseFolder
    epoch: int

    def is_ours(self) -> bool:
        """Whether no one has taken over since. Raises OSError when that cannot be seen."""
        return self.folder.is_newest(self.epoch)

    def seconds_ahead(self) -> float:
        """How far this machine's clock was ahead of the file server's (behind: below zero) when the
        turn was taken.

        Raises OSError or ValueError when that cannot be seen.
        """
        path = self.folder.file(self.epoch)
        return float(json.loads(read_bytes(path))["time"]) - path.stat().st_mtime

    def release(self) -> None:
        """End the turn; one that cannot be ended is over after a while."""
        with suppress(OSError):
            self.folder.renew(self.epoch, 0, held=False)
            self.folder.clear(KEPT_CLAIMS)


def acquire_lock(paths: RunPaths) -> WatchdogLock | str:
    """A turn, or in words who has it now. Raises OSError as the file system does."""
    folder = LeaseFolder(paths, FOLDER)
    epoch, content = folder.newest()
    if epoch and _is_held(content):
        age = folder.age(epoch)
        if age < STALE_SECONDS:
            return f"another watchdog is at work: {_who(content)}, since {duration(age)}"
    claim = LeaseClaim.of_this_process("pulse", 0)
    claim = replace(claim, epoch=epoch + 1)
    if folder.claim(epoch + 1, claim) and folder.is_newest(epoch + 1):
        return WatchdogLock(folder, epoch + 1)
    return "another watchdog has just begun"


def _is_held(content: bytes) -> bool:
    """Whether a claim's owner has not given it back; one that cannot be read yet is being written."""
    try:
        return bool(json.loads(content)["held"])
    except (ValueError, KeyError, TypeError):
        return True


def _who(content: bytes) -> str:
    try:
        value = json.loads(content)
        return f"{value['user']} on {value['host']}, process {value['pid']}"
    except (ValueError, KeyError, TypeError):
        return os.fsdecode(content[:_TAIL_BYTES]) or "no one has signed"


class WatchedRun(Record):
    """What is watched. `reader` answers within seconds, or fails; `typed` is the card as the person
    named it.
    """

    card: RunCard
    directory: RunDirectory
    reader: Scheduler | Unknown
    user: str
    typed: str = ""


class Actuator(Record):
    """What it takes to act: a patient edge to the scheduler, and a launch of an array behind a job
    or at once.
    """

    scheduler: Scheduler
    prepare: Callable[[str, str | None], LaunchJob]


class Pulse(Record):
    """One pass: what was seen and concluded, what was told, and what was done.

    `acts` says whether it was this pass's turn to act; `settled` are actions of killed passes whose
    end was found out. `notes` say what of its own work could not be done. `alerts` is what the
    alerts service returned, None if it failed or was not asked.
    """

    snapshot: Snapshot
    findings: tuple[Finding, ...]
    verdict: Verdict
    reported: tuple[Remark, ...]
    plan: Plan
    lines: tuple[str, ...]
    acts: bool = False
    done: tuple[Done, ...] = ()
    settled: tuple[ActionRecord, ...] = ()
    notes: tuple[str, ...] = ()
    alerts: AlertOutcome | None = None
    seconds: float = 0.0

    @property
    def state(self) -> State:
        return state_of(self.verdict, self.reported)

    @property
    def observed(self) -> bool:
        return seen_something(self.snapshot, self.verdict)


def take_pulse(
    run: WatchedRun,
    actuator: Actuator | None,
    *,
    email: bool = True,
    dry_run: bool = False,
    now: Callable[[], float] | None = None,
) -> Pulse:
    """One pass. Without `actuator` nothing is done but told; a dry run tells no one and writes
    nothing.

    `now` stands for the run's clock; without it the pass compares its own with that.

    Nothing is raised for what cannot be seen, written or sent: that is in the verdict and the
    notes.
    """
    began = time.monotonic()
    notes: list[str] = []
    if not dry_run and existing_fallback(run.directory) is not None:
        if now is None:
            moment = time.time()
        else:
            moment = now()
        # else it would be hidden when it is back
        if not look_for_directory(run.directory, run.reader, moment):
            notes += bring_back(run.directory)
    watchdog_lock, why_not = None, ""
    if actuator is not None and not dry_run and run.directory.exists:
        watchdog_lock, why_not = _watchdog_lock(run, notes)
    if why_not:
        notes.append(f"nothing is done: {why_not}")
    try:
        pulse = _pass(
            run,
            actuator,
            watchdog_lock=watchdog_lock,
            why_not=why_not,
            notes=notes,
            email=email,
            dry_run=dry_run,
            clock=now,
        )
    finally:
        if watchdog_lock is not None:
            watchdog_lock.release()
    return replace(pulse, seconds=time.monotonic() - began)


def tell_of_silence(
    run: WatchedRun, silence: str, *, email: bool = True, dry_run: bool = False
) -> Pulse:
    """One pass over a run whose directory does not answer, as `silence` says: it is not touched,
    nothing is done, and people are told.
    """
    began, notes = time.monotonic(), list[str]()
    facts = facts_of(run.card, run.typed)
    snapshot = observe(run.directory, facts, run.reader, time.time(), silence=silence)
    pulse = _judged(snapshot, detect_all(snapshot), Unknown(silence))
    if not dry_run:
        pulse = _told(run, pulse, situation=_condition_alone(pulse), email=email, notes=notes)
    return replace(pulse, notes=tuple(notes), seconds=time.monotonic() - began)


def _judged(snapshot: Snapshot, findings: tuple[Finding, ...], pause: Observed[str]) -> Pulse:
    """A pass that has looked, and neither told nor done anything yet."""
    verdict = judge(snapshot, findings)
    reported = remarks(snapshot, findings, verdict, pause)
    return Pulse(
        snapshot,
        with_what_resumes(snapshot, findings, verdict),
        verdict=verdict,
        reported=reported,
        plan=Plan(),
        lines=lines(snapshot, verdict, reported),
    )


def _watchdog_lock(run: WatchedRun, notes: list[str]) -> tuple[WatchdogLock | None, str]:
    """A turn to act; or None, and what keeps this pass from acting. What damaged files were set
    aside is a note.
    """
    try:
        watchdog_lock = acquire_lock(run.directory.paths)
    except OSError as error:
        return None, f"no one can be kept from doing the same: {cause(error)}"
    if isinstance(watchdog_lock, str):
        return None, watchdog_lock
    fault = _clock_fault(run, watchdog_lock)
    if fault:
        watchdog_lock.release()
        return None, fault
    notes += set_damage_aside(run.directory, AUTOMATIC_OWNER)
    for folder in (
        run.directory.journal,
        run.directory.submissions,
        run.directory.exclusions.with_suffix(".d"),
    ):
        refresh(folder)
    return watchdog_lock, ""


def _clock_fault(run: WatchedRun, watchdog_lock: WatchdogLock) -> str:
    """Why ages cannot be trusted here: to a clock that is ahead, every training is silent, and
    every job hangs.
    """
    try:
        ahead = watchdog_lock.seconds_ahead()
    except (OSError, ValueError) as error:
        return f"this machine's clock could not be compared with the file system's: {cause(error)}"
    if abs(ahead) <= run.card.watch.clock_skew_seconds:
        return ""
    way = "ahead of" if ahead > 0 else "behind"
    return f"this machine's clock is {duration(abs(ahead))} {way} the file system's, so ages cannot be trusted"


def _pass(
    run: WatchedRun,
    actuator: Actuator | None,
    watchdog_lock: WatchdogLock | None,
    why_not: str,
    notes: list[str],
    email: bool,
    dry_run: bool,
    clock: Callable[[], float] | None,
) -> Pulse:
    directory = run.directory
    facts = facts_of(run.card, run.typed)
    snapshot = observe(
        directory,
        facts,
        run.reader,
        look_now(directory, facts, run.reader) if clock is None else clock(),
    )
    now = snapshot.time
    if watchdog_lock is not None:
        _note_out_of_service(directory, snapshot, notes)
    findings = detect_all(snapshot)
    is_there = directory.exists and not snapshot.unmounted
    if not dry_run and is_there:
        snapshot, findings = _with_stacks(run, snapshot, findings, notes)
    ledger = read_journal(directory.journal, since=now - KEPT_SECONDS)
    policy_context = read_policy_context(directory, run.user, now, may_act=actuator is not None)
    pulse = _judged(snapshot, findings, policy_context.pause)
    verdict = pulse.verdict
    history, settled = _history(directory, ledger, now, notes), tuple[ActionRecord, ...]()
    if not dry_run and is_there:
        _log(directory, facts, _untold(directory, pulse.lines, now), notes)
    if not dry_run and (is_there or snapshot.unmounted):

        def expected() -> Plan:
            found = plan(
                snapshot, findings, verdict=verdict, history=history, policy_context=policy_context
            )
            if actuator is None or watchdog_lock is None:
                return found
            return as_it_would_go(found, _effects(run, actuator, snapshot))

        situation = _situation(
            run,
            pulse,
            expected=expected,
            history=history,
            may_act=watchdog_lock is not None,
            why_not=why_not,
            notes=notes,
        )
        pulse = _told(run, pulse, situation=situation, email=email, notes=notes)
    if watchdog_lock is not None:
        history, settled = _settled(history, snapshot, directory, notes)
    intended = plan(
        snapshot, findings, verdict=verdict, history=history, policy_context=policy_context
    )
    done: tuple[Done, ...] = ()
    if watchdog_lock is not None and actuator is not None and intended.actions:
        done = carry_out(
            intended.actions,
            _effects(run, actuator, snapshot).carry_out,
            Journal(directory.journal),
            stopped=lambda: _stopped(watchdog_lock, directory),
            progress=progress(snapshot),
            now=now,
        )
    records = _records(intended, done, settled)
    second = lines(snapshot, verdict, pulse.reported, records)[len(pulse.lines) :]
    if not dry_run and is_there:
        _log(directory, facts, second, notes)
        _keep_journal_heads(directory, now, notes)
        untold = publish(run.card.resilience.shared_exclusions, directory)
        if untold:
            notes.append(untold)
    return replace(
        pulse,
        plan=intended,
        lines=(*pulse.lines, *second),
        acts=watchdog_lock is not None,
        done=done,
        settled=settled,
        notes=tuple(dict.fromkeys(notes)),
    )


def _note_out_of_service(directory: RunDirectory, snapshot: Snapshot, notes: list[str]) -> None:
    """What the site has out of service of what is excluded, on the run's list."""
    try:
        note_out_of_service(directory, out_of_service(snapshot), snapshot.time)
    except (OSError, ValueError) as error:
        notes.append(f"what the site repairs could not be noted: {cause(error)}")


def _history(
    directory: RunDirectory, ledger: Ledger, now: float, notes: list[str]
) -> ActionHistory:
    """What was done, by the journal; not known where the journal has lost what an earlier pass has
    seen in it.
    """
    history = replay(ledger)
    heads = observed(lambda: read_heads(directory.paths))
    lost = words_of(lost_heads(known(heads, ()), ledger, now))
    if isinstance(heads, Unknown):
        notes.append(f"whether the journal was emptied cannot be told: {heads.why}")
    if not lost:
        return history
    notes.append(lost)
    return replace(history, read_error=history.read_error or lost)


def _keep_journal_heads(directory: RunDirectory, now: float, notes: list[str]) -> None:
    """Note how far the journal has come, with what this pass has written."""
    before = known(observed(lambda: read_heads(directory.paths)), ())
    heads = next_heads(before, read_journal(directory.journal, since=now - DAY_SECONDS), now)
    if set(heads) == set(before):
        return
    try:
        write_heads(directory.paths, heads)
    except OSError as error:
        notes.append(f"how far the journal has come could not be noted: {cause(error)}")


def _with_stacks(
    run: WatchedRun, snapshot: Snapshot, findings: tuple[Finding, ...], notes: list[str]
) -> tuple[Snapshot, tuple[Finding, ...]]:
    """Before people are told of a hang, its workers are asked who holds the others up; then it is
    judged again.
    """
    if not hanging_jobs(snapshot, findings):
        return snapshot, findings
    notes += take_missing_stacks(run.directory.paths, snapshot, findings, os.environ)
    stacks = read_stacks(run.directory.paths, [job.raw_id for job in snapshot.active_jobs])
    told = replace(snapshot, training=replace(snapshot.training, stacks=stacks))
    return told, detect_all(told)


def _stopped(watchdog_lock: WatchdogLock, directory: RunDirectory) -> str:
    """What has come since the look and forbids the next effect. Raises OSError when it cannot be
    seen.
    """
    if not watchdog_lock.is_ours():
        return "another watchdog has taken over"
    switch = switch_of(directory)
    if switch:
        return f"{switch} was set meanwhile"
    return ""


def _records(
    intended: Plan, done: tuple[Done, ...], settled: tuple[ActionRecord, ...]
) -> tuple[str, ...]:
    """What was done, or would be, and what was not, one line each."""
    found = [
        f"an earlier pass began to {record.action} {record.subject}: {record.message}"
        for record in settled
    ]
    found += [one.words() for one in done]
    begun = {id(one.action) for one in done}
    found += [f"would {action.words()}" for action in intended.actions if id(action) not in begun]
    for text in intended.withheld:
        would = ""
        if "; not done" in text:
            would = "would "
        found.append(f"{would}{text}")
    return tuple(found)


def _effects(run: WatchedRun, actuator: Actuator, snapshot: Snapshot) -> RunEffects:
    return RunEffects(
        directory=run.directory,
        scheduler=actuator.scheduler,
        prepare=actuator.prepare,
        card=run.card,
        user=run.user,
        nodes=frozenset(node.name for node in known(snapshot.nodes, ())),
        now=snapshot.time,
    )


def _settled(
    history: ActionHistory, snapshot: Snapshot, directory: RunDirectory, notes: list[str]
) -> tuple[ActionHistory, tuple[ActionRecord, ...]]:
    try:
        settled = settle(history.unfinished, snapshot, directory, Journal(directory.journal))
    except OSError as error:
        notes.append(f"what an earlier pass began could not be settled: {cause(error)}")
        return replace(history, read_error=f"the journal cannot be written: {cause(error)}"), ()
    known_ends = {record.number: record for record in settled}
    return replace(
        history, records=tuple(known_ends.get(record.number, record) for record in history.records)
    ), settled


# ----------------------------------------------------------------------------- notifying
def _situation(
    run: WatchedRun,
    pulse: Pulse,
    expected: Callable[[], Plan],
    history: ActionHistory,
    may_act: bool,
    why_not: str,
    notes: list[str],
) -> RunSituation:
    """What the mails say of the run. The plan is that of this moment: what is told comes before
    what is done.
    """
    try:
        return situation_of(
            run.directory,
            run.card,
            snapshot=pulse.snapshot,
            intended=expected(),
            action_history=history,
            may_act=may_act,
            why_not=why_not,
            verdict=pulse.verdict,
        )
    except (
        Exception
    ) as error:  # no fault of the plan or the forecast may keep people from hearing of the run
        notes.append(f"the mails do not say how the run is doing: {cause(error)}")
        return _condition_alone(pulse)


def _condition_alone(pulse: Pulse) -> RunSituation:
    return RunSituation(condition=condition_of(pulse.verdict, pulse.snapshot), knows_acts=False)


def _told(
    run: WatchedRun, pulse: Pulse, situation: RunSituation, email: bool, notes: list[str]
) -> Pulse:
    """Tell the people; what cannot be sent now is kept on disk by the service, and said here."""
    snapshot = pulse.snapshot
    hidden = unjudged_detectors(snapshot)
    held = held_verdict(snapshot, pulse.findings, pulse.verdict)
    sight = AlertInput(
        pulse.findings, hidden, observed=pulse.observed, situation=situation, verdict=held
    )
    try:
        sender = Sender.of(run.directory, run.card, snapshot.time, run.typed)
        outcome = process(sender, sight, email, snapshot.unmounted)
    except (OSError, ValueError, CardError) as error:
        notes.append(f"no one could be alerted: {cause(error)}")
        return pulse
    notes += outcome.notes
    return replace(pulse, alerts=outcome)


def _untold(directory: RunDirectory, texts: tuple[str, ...], now: float) -> tuple[str, ...]:
    """The lines that the run's log does not end with already."""
    tail = observed(lambda: tail_lines(directory.paths.main_log, LOG_TAIL_BYTES, (b"PULSE:",)))
    return without_told_alert(texts, known(tail, ([], True))[0], now)


def _log(
    directory: RunDirectory, facts: RunFacts, texts: tuple[str, ...], notes: list[str]
) -> None:
    """Append lines to the run's log in one write; the log is made where there is none. That of a job
    which is only watched is its owner's file: nothing is written there.
    """
    if not texts or facts.is_watched:
        return
    try:
        append_line(directory.paths.main_log, "\n".join(texts))
    except OSError as error:
        notes.append(f"the run's log could not be written: {cause(error)}")

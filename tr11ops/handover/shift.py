"""A shift's hand-over: what happened, what is open, what comes next. Pure: what was read of the run
in, lines out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tr11ops.alerts.state import Alert, Incident, OnCall, untold
from tr11ops.base.observed import Observed, Unknown, known
from tr11ops.base.units import duration
from tr11ops.detect.detector import Finding, Severity
from tr11ops.goodput.history_values import History
from tr11ops.goodput.timeline import Bucket
from tr11ops.observe import derived
from tr11ops.observe.files import PastProgress
from tr11ops.observe.jobs import standing_holds
from tr11ops.observe.snapshot import Snapshot
from tr11ops.runcard.card import difference_lines
from tr11ops.rundir.attempts import LaunchRecord, version_words
from tr11ops.rundir.exclusion import Exclusion, kept_off
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER
from tr11ops.rundir.journal import JournalEntry
from tr11ops.rundir.journal_lines import JournalLine, lines_of
from tr11ops.rundir.paths import Submission
from tr11ops.status.assessment import Assessment
from tr11ops.status.screen import copy_rows
from trainer.contract.attempt import EndMarker
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.goodput.account import Goodput
    from tr11ops.goodput.causes import Interruption
    from tr11ops.handover.start import StartOfShift

KIND = "handover"  # of the journal's entry
MOST_CHANGES = 12
LEAST_HOURS = 0.05  # less of a bucket is not worth a word


class HandoverMaterial(Assessment):
    """Everything that a hand-over is made of, read once. `begun` and `ended` are where the shift
    began and ended.
    """

    history: History
    goodput: Goodput
    incidents: Observed[tuple[Incident, ...]]
    journal: tuple[JournalEntry, ...]
    begun: PastProgress | None
    ended: PastProgress | None
    cards: Mapping[str, Mapping[str, Any]]  # of the submissions, by tag
    read_errors: tuple[str, ...] = ()


class Happened(Record):
    """One thing with its moment. `who` did it; "" for what no one did."""

    time: float
    text: str
    who: str = ""
    why: str = ""


class ShiftProgress(Record):
    """What the shift's training came to; what its trainer does not count is None.

    `useful` is the share (0..1) of the held node time that counts, `useful_did` what that did.
    """

    iterations: int
    samples: int | None
    tokens: int | None
    first: int
    last: int
    loss_before: float | None
    loss_now: float | None
    useful: float | None
    node_hours: float
    useful_did: str = "trained what was kept"


class Trouble(Record):
    """One incident of the shift. `told` and `lasted` are seconds from its first sign; `lasted`
    None: still open.
    """

    time: float
    severity: Severity
    title: str
    acknowledged_by: str
    told: float
    lasted: float | None


class ShiftInterruption(Record):
    """An end that no one meant. `down`: seconds from its first sign until the training went on;
    None: not yet.

    `node_hours`: what it cost, by bucket of the account; `trained_again`: iterations that no
    checkpoint held.
    """

    time: float
    job: str
    cause: str
    blamed: tuple[str, ...]
    decision: str
    down: float | None
    evidence: tuple[str, ...] = ()
    node_hours: Mapping[str, float] = {}
    trained_again: int = 0

    @property
    def names_its_node(self) -> bool:
        """Whether the cause begins with the node that is to blame."""
        return len(self.blamed) == 1 and self.cause.startswith(f"{self.blamed[0]}: ")


class Handover(Record):
    """One shift, from `since` to `until` (seconds since the epoch). `basis` says why it begins
    there.
    """

    run: str
    variant: str
    since: float
    until: float
    basis: str
    verdict: str
    answer: str
    why: str
    progress: ShiftProgress | None
    incidents: tuple[Trouble, ...]
    restarts: tuple[ShiftInterruption, ...]
    ends: tuple[Happened, ...]
    checkpoints: tuple[int, ...]
    nodes: tuple[Happened, ...]
    people: tuple[Happened, ...]
    automatic: tuple[Happened, ...]
    changes: tuple[Happened, ...]
    open: tuple[Happened, ...]
    coming: tuple[Happened, ...]
    read_errors: tuple[str, ...]
    saves_unseen: bool = False  # its checkpoints are not looked at
    copies: str = ""
    software: str = ""  # of the newest attempt: its code and versions
    # for the one who begins a shift, and not for the one who ends it
    start: StartOfShift | None = None


def hand_over(
    material: HandoverMaterial, since: float, until: float, basis: str, coming: Iterable[Happened]
) -> Handover:
    """The hand-over of the shift from `since` to `until`; `coming` are the events ahead, by time."""
    snapshot = material.snapshot
    entries = [entry for entry in material.journal if since <= entry.time < until]
    done = lines_of(entries)
    return Handover(
        run=snapshot.run.name,
        variant=snapshot.run.variant,
        since=since,
        until=until,
        basis=basis,
        verdict=material.verdict.word.value,
        answer=material.answer.text,
        why=material.verdict.why,
        progress=_progress(material, since, until),
        incidents=tuple(_incidents(material, since, until)),
        restarts=tuple(_restarts(material, since, until)),
        ends=tuple(_ends(snapshot, since, until)),
        saves_unseen=_saves_unseen(snapshot),
        checkpoints=tuple(
            mark.step
            for mark in known(material.history.checkpoints, ())
            if since <= mark.created < until
        ),
        nodes=tuple(_happened(line) for line in done if line.is_of_a_node),
        people=tuple(
            _happened(line) for line in done if line.is_of_a_person and not line.is_of_a_node
        ),
        automatic=tuple(
            _happened(line) for line in done if not line.is_of_a_person and not line.is_of_a_node
        ),
        changes=(
            *_changes(known(material.history.submissions, ()), material.cards, since, until),
            *_attempt_changes(snapshot, since, until),
        ),
        open=tuple(_open(material)),
        coming=tuple(sorted(coming, key=lambda event: event.time)),
        read_errors=tuple(dict.fromkeys(material.read_errors)),
        copies="; ".join(words for _, words, _ in copy_rows(material.status)),
        software=_software(snapshot),
    )


def _software(snapshot: Snapshot) -> str:
    newest = derived.last_attempt(snapshot)
    if newest is None or newest.code is None:
        return ""
    return "; ".join(
        filter(
            None,
            (f"{newest.label or newest.job_id}: {newest.code}", version_words(newest.versions)),
        )
    )


def last_handover(entries: Iterable[JournalEntry]) -> JournalEntry | None:
    """The newest hand-over on record."""
    return max(
        (entry for entry in entries if entry.kind == KIND),
        key=lambda entry: entry.time,
        default=None,
    )


# ----------------------------------------------------------------------------- what happened
def _progress(material: HandoverMaterial, since: float, until: float) -> ShiftProgress | None:
    begun = material.begun or PastProgress(0, 0, 0, None)
    ended = material.ended
    if ended is None:
        return None
    part = material.goodput.between(since, until)
    return ShiftProgress(
        iterations=ended.iteration - begun.iteration,
        samples=_moved(begun.consumed_samples, ended.consumed_samples),
        tokens=_moved(begun.consumed_tokens, ended.consumed_tokens),
        first=begun.iteration,
        last=ended.iteration,
        loss_before=begun.loss,
        loss_now=ended.loss,
        useful=part.useful_of_held,
        useful_did=part.useful_did,
        node_hours=part.total.held_hours,
    )


def _moved(begun: int | None, ended: int | None) -> int | None:
    if begun is None or ended is None:
        return None
    return ended - begun


def _incidents(material: HandoverMaterial, since: float, until: float) -> Iterator[Trouble]:
    """Those that were open at any moment of the shift; what no one is told of is left out."""
    for incident in known(material.incidents, ()):
        over = incident.lasted_to
        if (
            incident.lasted_from >= until
            or (over is not None and over < since)
            or incident.severity < Severity.WARNING
        ):
            continue
        yield Trouble(
            time=incident.lasted_from,
            severity=incident.severity,
            title=incident.title,
            acknowledged_by=incident.acknowledged_by,
            told=max(0.0, incident.opened - incident.lasted_from),
            lasted=None if over is None or over >= until else max(0.0, over - incident.lasted_from),
        )


def _restarts(
    material: HandoverMaterial, since: float, until: float
) -> Iterator[ShiftInterruption]:
    launches = {
        (attempt.job_id, launch.launch): (attempt.label, launch)
        for attempt in known(material.history.attempts, ())
        for launch in attempt.launches
    }
    for fault in material.goodput.faults:
        if not since <= fault.time < until:
            continue
        label, launch = launches.get((fault.job_id, fault.launch), (fault.job_id, None))
        again = None
        if fault.recovered is not None and fault.recovered < until:
            again = fault.recovered
        yield ShiftInterruption(
            time=fault.time,
            job=label,
            cause=(launch.summary if launch is not None else "") or fault.why or fault.cause,
            blamed=launch.blamed if launch is not None else (),
            decision=launch.decision if launch is not None else "",
            down=None if again is None else again - fault.time,
            evidence=(launch.evidence or launch.srun_lines) if launch is not None else (),
            node_hours=cost_of(material.goodput, fault, until if again is None else again),
            trained_again=_trained_again(launch),
        )


def cost_of(goodput: Goodput, fault: Interruption, end: float) -> dict[str, float]:
    """Node hours by bucket: all but useful ones until the training went on, and what the launch had
    trained in vain.
    """
    before = goodput.between(goodput.begin, fault.time).spans
    own = [span for span in before if (span.job_id, span.launch) == (fault.job_id, fault.launch)]
    lost = [span for span in own if span.bucket in {Bucket.REDONE, Bucket.HANG}]
    lost += [
        span for span in goodput.between(fault.time, end).spans if span.bucket is not Bucket.USEFUL
    ]
    found: dict[str, float] = {}
    for span in lost:
        found[span.bucket.value] = found.get(span.bucket.value, 0.0) + span.node_micros / 3.6e9
    return {name: hours for name, hours in found.items() if hours >= LEAST_HOURS}


def _trained_again(launch: LaunchRecord | None) -> int:
    if launch is None or launch.iteration_after is None or launch.checkpoint_after is None:
        return 0
    return max(0, launch.iteration_after - launch.checkpoint_after)


def _ends(snapshot: Snapshot, since: float, until: float) -> Iterator[Happened]:
    """Attempts that ended with the trainer's own word, as they should."""
    for attempt in reversed(known(snapshot.attempts, ())):
        end = attempt.end
        if isinstance(end, EndMarker) and since <= end.time < until:
            step = end.checkpoint_step
            if not end.has_trained:
                saved = ""
            elif step is None:
                saved = "" if _saves_unseen(snapshot) else ", nothing saved"
            else:
                saved = f", checkpoint of step {step}"
            name = attempt.label or attempt.job_id
            yield Happened(end.time, f"{name} ended: {end.reason} {end.place}{saved}")


def _saves_unseen(snapshot: Snapshot) -> bool:
    standing = snapshot.run.standing
    return standing is not None and standing.holds_nothing


def _happened(line: JournalLine) -> Happened:
    return Happened(line.time, line.text, line.who, line.why)


def _changes(
    submissions: Sequence[Submission],
    cards: Mapping[str, Mapping[str, Any]],
    since: float,
    until: float,
) -> Iterator[Happened]:
    """What the cards of the shift's submissions say otherwise than the one before each."""
    ordered = sorted(submissions, key=lambda entry: (entry.time, entry.tag))
    for before, after in pairwise(ordered):
        if not since <= after.time < until or before.card_hash == after.card_hash:
            continue
        first = cards.get(before.tag)
        second = cards.get(after.tag)
        if after.job_id is not None:
            name = f"job {after.job_id}"
        else:
            name = after.tag
        if first is None or second is None:
            yield Happened(
                after.time, f"{name}: the card was changed; what in it cannot be read", after.user
            )
            continue
        found = list(difference_lines(first, second))
        more = ""
        if len(found) > MOST_CHANGES:
            more = f"; and {len(found) - MOST_CHANGES} more"
        if found:
            yield Happened(
                after.time, f"{name}: {'; '.join(found[:MOST_CHANGES])}{more}", after.user
            )


def _attempt_changes(snapshot: Snapshot, since: float, until: float) -> Iterator[Happened]:
    """Other nodes and versions than the attempt before had; what its card says otherwise is told by
    `_changes`.
    """
    for attempt in known(snapshot.attempts, ()):
        lines = [line for line in attempt.changes if ": card " not in line]
        if lines and attempt.start is not None and since <= attempt.start < until:
            yield Happened(attempt.start, f"{attempt.label or attempt.job_id} {'; '.join(lines)}")


# ----------------------------------------------------------------------------- what is open
def _open(material: HandoverMaterial) -> Iterator[Happened]:
    snapshot = material.snapshot
    alerts = material.extra.alerts
    yield from _alerts(snapshot, known(alerts, ()), material.extra.on_call)
    yield from _faults(material.findings, known(alerts, ()), snapshot.time)
    seen = not isinstance(snapshot.jobs, Unknown)
    for hold in standing_holds(snapshot):
        is_held = "was held, and whether it still is cannot be seen"
        if seen:
            is_held = "is held"
        words = f"job {hold.job} {is_held} (`{derived.command(snapshot, 'resume')}` releases it)"
        yield Happened(hold.time or snapshot.time, words, hold.who, hold.why)
    stops = {"the kill switch is set": snapshot.kill_switch, "the run is paused": snapshot.pause}
    for words, stop in stops.items():
        if stop is not None and not isinstance(stop, Unknown):
            yield Happened(stop.time or snapshot.time, words, stop.who, stop.why)
    yield from _exclusions(known(snapshot.exclusions, ()), snapshot.time)


def _alerts(
    snapshot: Snapshot, alerts: Iterable[Alert], on_call: OnCall | None
) -> Iterator[Happened]:
    """The open alerts."""
    for alert in alerts:
        has = alert.care.words(on_call, snapshot.time)
        if not (alert.holder or alert.clear_looks):
            has += f" (`{derived.command(snapshot, f'alerts ack {alert.fingerprint}')}`)"
        page = ""
        if alert.runbook:
            page = f", runbook {alert.runbook}"
        yield Happened(alert.start, f"{alert.severity.name} alert: {alert.title}; {has}{page}")


def _faults(findings: Iterable[Finding], alerts: Sequence[Alert], now: float) -> Iterator[Happened]:
    """What this look found and no alert stands for, because no watchdog has looked since."""
    for finding in untold(findings, alerts):
        fix = "".join(f" (`{line}`)" for line in finding.commands)
        more = "".join(f"; from it follows: {one.title}" for one in finding.consequences)
        yield Happened(
            now, f"{finding.severity.name}: {finding.title}{fix}{more}; no alert was opened yet"
        )


def _exclusions(exclusions: Iterable[Exclusion], now: float) -> Iterator[Happened]:
    for entry in exclusions:
        due = ""
        if entry.until is not None:
            if entry.until <= now:
                due = ", due for a check"
            else:
                due = f", for another {duration(entry.until - now)}"
        owner = "" if entry.owner == AUTOMATIC_OWNER else entry.owner
        yield Happened(
            entry.since or now, f"{entry.node} is {kept_off(entry.state)}{due}", owner, entry.why
        )

"""The alert state: one alert per incident, what people were told of it, and what is still to be
done about it.

Values only: what happens to an alert state is in `incidents.py` (what a look saw) and `notify.py`
(who hears of it). Times are seconds since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from tr11ops.base.units import duration
from tr11ops.detect.detector import Finding, Severity, by_cause, lead, once_fixed
from trainer.contract.record import Record
from trainer.contract.units import shortened

# That a fault is over: `cleared` where the run is well, `replaced` where another fault stands or
# that is not known.
OVER = frozenset({"cleared", "replaced"})
# Findings whose subject is the attempt that ended, and those after which nothing goes on until a
# person lets it.
ENDS = frozenset({"start-failed", "unfinished-end"})
WAITING = frozenset({"start-failed", "held", "down"})
WATCHDOG = "tr11"  # who does what no one typed
CLOSED_KEPT = 2000  # incidents; at some 300 bytes each the alert state stays below a megabyte
LONGEST_PAST_TITLE = 160


class Consequence(Record):
    """What follows from an alert's fault: another finding, which has no alert of its own while that
    stands.

    `then` are the commands that are still to be typed when the cause is gone.
    """

    fingerprint: str
    detector: str
    severity: Severity
    title: str
    then: tuple[str, ...] = ()


class Alert(Record):
    """One incident, from the first look that saw it to the all-clear, and who deals with it.

    `began` is the first look that saw the fault; `since` when it began by its own evidence, and
    `until` the first look that did not see it any more: of the last time, where it came back;
    `first_since` is that of the first. `opened` is when people were first told (`began` until
    then), `last_seen` the last look that saw it. `clear_looks` counts looks in a row that could
    judge and saw nothing, `milder_looks` those that saw a lesser fault; `severity` is the highest
    since it last became milder.

    `said` is what those in `told` believe now: the severity they last heard of; None before the
    first message and after the all-clear. `alarmed` is the message that escalation counts from,
    `escalated` how many of its steps were taken, `sends` how many messages went out, `last_sent`
    when the last one did, `remind` that it must be said once again. `heard` is the highest severity
    that any message of this incident named. `identity` is the finding's; None in a record of an
    older tr11. `thread` are the Message-IDs of the incident's first message (one for each group of
    people that got it in a mail of its own).

    `called_over` is when people were last told that it was over; `returned` when they were last
    told that it is back.

    `watchdog` is what the watchdog did about it, will do, or does not do and why, a sentence of the
    last look.

    `then` are the finding's. `consequences` are what follows from the fault; `members` the
    fingerprints of all findings that ever were of this incident: each still names it. `headline` is
    the fingerprint of what people were last told as the cause, "" in a record of an older tr11.
    `told_as` is the title that people know it by, where it goes on as another fault's without a
    message; else "". `fault` is the finding's class of fault, as last seen. `held_at` is the attempt after which
    nothing went on without a person, as people were told.

    `closes` is for readers, and kept nowhere: when the watchdog closes what is no longer found, where
    one looks (`ExtraObservations.seen_with`).
    """

    fingerprint: str
    detector: str
    subject: str
    severity: Severity
    title: str
    evidence: tuple[str, ...]
    fix: str
    runbook: str
    began: float
    opened: float
    last_seen: float
    clear_looks: int = 0
    milder_looks: int = 0
    acknowledged_by: str = ""
    acknowledged_at: float | None = None
    acknowledged_why: str = ""
    first_acknowledged_by: str = ""
    owner: str = ""
    snoozed_until: float | None = None
    snoozed_by: str = ""
    resolved_at: float | None = None
    resolved_by: str = ""
    resolved_why: str = ""
    said: Severity | None = None
    told: tuple[str, ...] = ()
    sends: int = 0
    last_sent: float | None = None
    alarmed: float | None = None
    escalated: int = 0
    remind: bool = False
    thread: str = ""
    heard: Severity | None = None
    identity: tuple[str, ...] | None = None
    then: tuple[str, ...] = ()
    consequences: tuple[Consequence, ...] = ()
    members: tuple[str, ...] = ()
    headline: str = ""
    told_as: str = ""
    since: float | None = None
    until: float | None = None
    first_since: float | None = None
    called_over: float | None = None
    returned: float | None = None
    watchdog: str = ""
    fault: str = ""
    by_itself: str = ""
    held_at: str = ""
    closes: float | None = None

    @property
    def waits_for_person(self) -> bool:
        """Whether nothing goes on after its attempt until a person lets it."""
        if self.severity is not Severity.CRITICAL or self.detector not in ENDS:
            return False
        return not WAITING.isdisjoint(self.detectors)

    @property
    def is_uncured(self) -> bool:
        """Whether the run has gone on since, and another attempt has ended in the same way. Who let it
        go on is not known: a person, or a watchdog that may act.
        """
        return self.waits_for_person and self.held_at not in {"", self.subject}

    @property
    def incident(self) -> str:
        """Its name among all incidents of its fingerprint, which come and go."""
        return f"{self.fingerprint}-{stamp(self.began)}"

    @property
    def names(self) -> tuple[str, ...]:
        """Its fingerprint, and those of the findings that are of the same incident."""
        return tuple(dict.fromkeys((self.fingerprint, *self.members)))

    @property
    def known_as(self) -> str:
        """Its title as people know it: that of the last message."""
        return self.told_as or self.title

    @property
    def detectors(self) -> tuple[str, ...]:
        """Its detector, and those of what follows from it."""
        return tuple(dict.fromkeys((self.detector, *(one.detector for one in self.consequences))))

    @property
    def commands_after(self) -> tuple[str, ...]:
        """What is still to be typed when its `fix` has helped, each command once."""
        return once_fixed(self.fix, self.then, *(one.then for one in self.consequences))

    @property
    def start(self) -> float:
        """When the fault began, as far as that is known."""
        if self.since is None:
            return self.began
        return self.since

    @property
    def end(self) -> float | None:
        """When it was over: not when that was sure; None while it stands."""
        if self.until is not None and self.resolved_at is not None:
            return self.until
        return self.resolved_at

    @property
    def comes_and_goes_since(self) -> float | None:
        """Since when it comes and goes, by what people were told; None where it stood all the time."""
        first = self.first_since
        told = self.opened
        if self.returned is not None:
            first = told = self.returned
        if self.start > told:
            return first
        return None

    @property
    def is_open(self) -> bool:
        return self.resolved_at is None

    @property
    def has_new_cause(self) -> bool:
        """Whether people were told of it, but not of the cause that is known now."""
        return self.headline not in {"", self.fingerprint}

    @property
    def is_acknowledged(self) -> bool:
        return self.acknowledged_at is not None

    @property
    def care(self) -> AlertCare:
        """Who looks after it."""
        return AlertCare(
            self.owner,
            self.acknowledged_by,
            self.snoozed_until,
            self.told,
            is_found=not self.clear_looks,
            closes=self.closes,
            subject=f"{self.detector} {self.subject}".strip(),
        )

    @property
    def holder(self) -> str:
        return self.care.holder

    def acknowledged_as(self, other: Alert) -> Alert:
        """With the acknowledgement of another alert of the same incident."""
        return replace(
            self,
            acknowledged_by=other.acknowledged_by,
            acknowledged_at=other.acknowledged_at,
            acknowledged_why=other.acknowledged_why,
            first_acknowledged_by=self.first_acknowledged_by or other.first_acknowledged_by,
        )

    def unacknowledged(self) -> Alert:
        return replace(self, acknowledged_by="", acknowledged_at=None, acknowledged_why="")

    def joined_with(self, other: Alert) -> Alert:
        """With what people know and have said of the alert of what follows from it."""
        said = [severity for severity in (self.said, other.said) if severity is not None]
        heard = [severity for severity in (self.heard, other.heard) if severity is not None]
        joined = replace(
            self,
            severity=max(self.severity, other.severity),
            began=min(self.began, other.began),
            since=min(self.start, other.start),
            said=max(said, default=None),
            heard=max(heard, default=None),
            told=tuple(dict.fromkeys((*self.told, *other.told))),
            owner=self.owner or other.owner,
            members=tuple(dict.fromkeys((*self.names, *other.names))),
        )
        if self.is_acknowledged or not other.is_acknowledged:
            return joined
        return joined.acknowledged_as(other)


class Incident(Record):
    """What remains of an alert for reports. Times as in `Alert`; `resolved` is None while the fault
    stands.

    `start` is when the fault began first, `end` when it was over at last; None in a record of an
    older tr11, and where it is not over: see `lasted_from` and `lasted_to`.
    """

    fingerprint: str
    detector: str
    subject: str
    severity: Severity
    title: str
    began: float
    opened: float
    acknowledged_by: str
    resolved: float | None
    start: float | None = None
    end: float | None = None

    @property
    def lasted_from(self) -> float:
        if self.start is None:
            return self.began
        return self.start

    @property
    def lasted_to(self) -> float | None:
        """When it was over; None while the fault stands."""
        if self.end is None:
            return self.resolved
        return self.end


class MessagePart(Record):
    """That something is said of an alert, and to whom: kind of message and addresses."""

    alert: Alert
    kind: str
    to: tuple[str, ...]


class Message(Record):
    """One message to people: written once, sent to each of `to` (and to every delivery URL) once.

    `id` is the same however often the message is made again, and names its file and its Message-ID.
    `kind` is opened, raised, reopened, again, escalated, repeated, assigned, taken-over, cleared, replaced,
    digest, finished, shift, test or site; of several alerts, that of the first. `alert` is the first
    alert's fingerprint, "" for what belongs to none; `alerts` are all of them, and `kinds` what is
    said of each. `thread` are the Message-IDs of the incidents' first messages, "" for the first
    one itself. `appendix` is for mails alone; `urls` says whether the delivery URLs get it.
    `opening` counts the characters of the body's first lines, behind which a mail has its link to
    answer by.
    """

    id: str
    kind: str
    alert: str
    detector: str
    severity: Severity
    subject: str
    body: str
    to: tuple[str, ...]
    time: float
    message_id: str
    thread: str = ""
    alerts: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    appendix: str = ""
    urls: bool = True
    opening: int = 0


class UndeliveredMessages(Record):
    """Messages that no server has taken yet: how many, when the oldest was written, and the last
    thing that failed.
    """

    count: int = 0
    since: float | None = None
    trouble: str = ""


class AlertEvent(Record):
    """Something for the journal: kind, who, why and data, as `Journal.write` takes them.

    `id` goes into the data, so that an entry that a kill made the journal hold twice is known as
    one.
    """

    id: str
    kind: str
    who: str
    why: str
    time: float
    data: Mapping[str, Any]


class OnCall(Record):
    """Who is told first: all recipients where there is no rota, () where the card names no one.
    `until`: when that changes, None for never. `taken`: when `who` took the shift in place of the
    rota, None where the rota counts. A shift that is given back ends at that moment.
    """

    who: tuple[str, ...] = ()
    until: float | None = None
    taken: float | None = None

    def holds(self, now: float) -> bool:
        """Whether it is a shift that was taken, and is not over."""
        if self.taken is None or self.until is None:
            return False
        return elapsed(self.taken, now) < self.until - self.taken

    @property
    def names(self) -> str:
        return ", ".join(self.who) or "no one named"

    def words(self, now: float) -> str:
        """Who it is, and for how much longer where they took the shift."""
        if self.taken is None or self.until is None:
            return self.names
        return f"{self.names} (took the shift, {duration(max(0.0, self.until - now))} left)"


class AlertCare(Record):
    """Who looks after an open alert: to whom it was given (`owner`), who took it (`acknowledged_by`),
    "" for no one; whose mail addresses were `told` of it. `is_found`: the last look found its fault;
    else `closes` is when the watchdog closes it, None where none is known to look. `subject`: which
    fault it is, of what. Of a fault that has no alert yet (`is_told` False) `closes` is the
    watchdog's next look.
    """

    owner: str = ""
    acknowledged_by: str = ""
    snoozed_until: float | None = None
    told: tuple[str, ...] = ()
    is_found: bool = True
    closes: float | None = None
    subject: str = ""
    is_told: bool = True

    @property
    def holder(self) -> str:
        """Who has it: to whom it was given, else who took it; "" for no one."""
        return self.owner or self.acknowledged_by

    @property
    def person(self) -> str:
        """Who has it, without who typed that."""
        return self.holder.partition(" ")[0]

    def snooze_left(self, now: float) -> float:
        """Seconds without a message about it; 0 where it is not snoozed."""
        return max(0.0, (self.snoozed_until or 0.0) - now)

    def words(self, on_call: OnCall | None, now: float, it: str = "it") -> str:
        """Who has it; where no one has, who is called instead, None for where that is unknown. What
        every screen says of it. Of what is no longer found: what becomes of it; of what no one was told
        of: when who will be. `it`: "them" for several.
        """
        if not self.is_told:
            if self.closes is None:
                return "not told yet: no watchdog looks, so no one will be told"
            words = "not told yet: the watchdog looks "
            words += f"within {duration(self.closes - now)}" if self.closes > now else "now"
            if on_call is not None and on_call.who:
                words += f" and then tells {on_call.names}"
            return words
        if not self.is_found:
            words = "no longer found"
            if self.closes is not None and it == "them":
                words += ", and close by themselves"
            elif self.closes is not None:
                minutes = max(1, math.ceil((self.closes - now) / 60.0))
                words += f"; the watchdog closes it in about {duration(60.0 * minutes)}"
            if self.holder:
                words += f"; {self.holder} has {it}"
            return words
        words = f"{self.holder or 'no one'} has {'' if self.holder else 'taken '}{it}"
        if self.owner and self.acknowledged_by not in {"", self.owner}:
            words += f", acknowledged by {self.acknowledged_by}"
        left = self.snooze_left(now)
        if left:
            words += f", snoozed for {duration(left)}"
        if self.holder or on_call is None:
            return words
        return words + self._called(on_call)

    def _called(self, on_call: OnCall) -> str:
        """Who is on call for it, as the end of a sentence; "" where the card names no one."""
        if not on_call.who:
            return ""
        verbs = ("is", "was") if len(on_call.who) == 1 else ("are", "were")
        words = f"; {on_call.names} {verbs[0]} on call"
        if set(on_call.who) <= set(self.told):
            words += f" and {verbs[1]} told"
        return words


def alerts_words(cares: Sequence[AlertCare], on_call: OnCall | None, now: float) -> str:
    """How many faults no one was told of yet, how many alerts are open, and who has them; last those that
    are no longer found. Where there are several, each is named by what it is about.
    """
    alike: dict[str, list[AlertCare]] = {}
    for care in sorted(cares, key=attrgetter("is_found"), reverse=True):
        alike.setdefault(care.words(None, now, "them"), []).append(care)
    said = []
    for some in alike.values():
        named = ""
        verb = "are"
        it = "them"
        if len(cares) > 1:
            named = f" ({', '.join(care.subject for care in some)})"
        if len(some) == 1:
            verb = "is"
            it = "it"
        # that someone was told holds where it was of each of them
        words = min((care.words(on_call, now, it) for care in some), key=len)
        standing = "open: " if some[0].is_told and some[0].is_found else ""
        said.append(f"{len(some)}{named} {verb} {standing}{words}")
    return "; ".join(said)


def untold(findings: Iterable[Finding], alerts: Iterable[Alert]) -> list[Finding]:
    """What a look has found that is worth a message, and that no open alert stands for."""
    standing = {name for alert in alerts for name in alert.names}
    return [
        finding
        for finding in by_cause(findings)
        if finding.severity >= Severity.WARNING and finding.fingerprint not in standing
    ]


HEALTHY = "healthy"  # the verdict that a restart between two looks does not end


class HeldVerdict(Record):
    """The verdict of the looks so far: the last `word` that was not "unknown", and `since` when it
    holds, by its evidence or else by the first look that concluded it; None where neither tells.
    `judged` is the last look that concluded it. `unseen`: since when looks only say "unknown"; None
    where the last one told more.
    """

    word: str
    since: float | None
    judged: float
    unseen: float | None = None

    def after(self, before: HeldVerdict | None) -> HeldVerdict:
        """What is kept of this look and those before it. A look that could not tell takes nothing
        back; another verdict than before cannot be older than the last look that concluded that. The
        same verdict holds since it first held, unless the trouble that it names began after that
        look: then another one was over in between.
        """
        if self.unseen is not None:
            known_before = before or self
            return replace(known_before, unseen=known_before.unseen or self.unseen)
        since = self.since
        if before is not None and before.word == self.word and before.since is not None:
            if since is None or since <= before.judged or self.word == HEALTHY:
                since = before.since
        elif before is not None and before.word not in {"", self.word}:
            since = max(before.judged, self.judged if since is None else since)
        return replace(self, since=since)


class AlertState(Record):
    """All alerts that are open or were lately closed, and what is decided but not yet on its way.

    `messages` and `events` are written in the same stroke as what caused them, so that no kill can
    part them; they leave the alert state when outbox and journal hold them. `closed` are older
    incidents, the newest last. `looked` is the last look, `looked_by` whose it was, `blind` the
    detectors that could not judge then, `digested` the last digest's moment. `finished` is the look
    at which people were told that all is trained. `verdict` is what the looks concluded; None before
    the first one of a watchdog. `shift` is the one that was taken last, `shift_over` its end
    once those whom it concerns were told of that.
    """

    alerts: tuple[Alert, ...] = ()
    closed: tuple[Incident, ...] = ()
    messages: tuple[Message, ...] = ()
    events: tuple[AlertEvent, ...] = ()
    looked: float | None = None
    looked_by: str = ""
    blind: tuple[str, ...] = ()
    digested: float | None = None
    finished: float | None = None
    verdict: HeldVerdict | None = None
    shift: OnCall | None = None
    shift_over: float | None = None

    @property
    def open_alerts(self) -> tuple[Alert, ...]:
        """The open ones: the most severe first, of equals the strongest cause, then the oldest."""
        found = (alert for alert in self.alerts if alert.is_open)
        in_order = sorted(found, key=lambda alert: (alert.began, alert.fingerprint))
        return tuple(sorted(in_order, key=lambda alert: lead(alert.detector, alert.severity)))

    def find(self, fingerprint: str) -> Alert | None:
        return next((alert for alert in self.alerts if alert.fingerprint == fingerprint), None)

    def with_alert(self, alert: Alert) -> AlertState:
        """The alert state with this alert in place of the one of the same fingerprint, or added."""
        others = tuple(entry for entry in self.alerts if entry.fingerprint != alert.fingerprint)
        return replace(self, alerts=(*others, alert))

    def with_events(self, events: Iterable[AlertEvent]) -> AlertState:
        return replace(self, events=(*self.events, *events))

    def incidents(self) -> tuple[Incident, ...]:
        """Every incident that is remembered, oldest first."""
        found = (*self.closed, *map(incident_of, self.alerts))
        return tuple(sorted(found, key=lambda incident: (incident.began, incident.fingerprint)))


def incident_of(alert: Alert) -> Incident:
    return Incident(
        fingerprint=alert.fingerprint,
        detector=alert.detector,
        subject=alert.subject,
        severity=alert.severity,
        title=shortened(alert.title, LONGEST_PAST_TITLE),
        began=alert.began,
        opened=alert.opened,
        acknowledged_by=alert.acknowledged_by or alert.first_acknowledged_by,
        resolved=alert.resolved_at,
        start=alert.began if alert.first_since is None else alert.first_since,
        end=alert.end,
    )


def event_of(
    alert: Alert, kind: str, why: str, now: float, who: str = WATCHDOG, **more: Any
) -> AlertEvent:
    """An event about an alert. Its id repeats only when the very same thing is recorded again."""
    name = f"{alert.incident}-{kind}-{stamp(now)}"
    data = {
        "fingerprint": alert.fingerprint,
        "detector": alert.detector,
        "subject": alert.subject,
        "severity": alert.severity.name,
        "title": alert.title,
        **more,
    }
    return AlertEvent(name, kind, who=who, why=why, time=now, data=data)


def stamp(seconds: float) -> str:
    """A moment as a short word for names, to the millisecond."""
    return f"{round(seconds * 1000):x}"


def elapsed(since: float | None, now: float) -> float:
    """Seconds from `since` to `now`; infinite where there is no such moment, or where it is no
    moment to go by.

    Clocks of two machines differ a little, which counts as no time at all. A moment more than an
    hour ahead is what a clock that ran ahead has left behind: waiting for it could take years.
    """
    if since is None or since - now > 3600.0:
        return math.inf
    return max(0.0, now - since)


# ----------------------------------------------------------------- two states that went on from one
# The run's own, and that of a machine which could not write it.


def merged(home: AlertState, local: AlertState) -> AlertState:
    """What both alert states know: of each alert the later word, every incident, and all that is
    still to be done.
    """
    alerts = _open_in(home, local)
    closed = {(one.fingerprint, one.began): one for one in (*home.closed, *local.closed)}
    for alert in _open_in(local, home).values():
        other = alerts.get(alert.fingerprint)
        if other is None:
            alerts[alert.fingerprint] = alert
        else:
            alerts[alert.fingerprint] = _later(other, alert)
        if other is not None and other.began != alert.began:  # another incident of the same fault
            older = min(other, alert, key=lambda one: one.began)
            closed[older.fingerprint, older.began] = incident_of(older)
    standing = {(alert.fingerprint, alert.began) for alert in alerts.values()}
    ended = sorted(
        (one for key, one in closed.items() if key not in standing), key=lambda one: one.began
    )
    newest = home if (home.looked or 0.0) >= (local.looked or 0.0) else local
    digests = [
        alert_state.digested for alert_state in (home, local) if alert_state.digested is not None
    ]
    return replace(
        newest,
        alerts=tuple(alerts.values()),
        closed=tuple(ended[-CLOSED_KEPT:]),
        messages=tuple(
            {message.id: message for message in (*home.messages, *local.messages)}.values()
        ),
        events=tuple({event.id: event for event in (*home.events, *local.events)}.values()),
        digested=max(digests, default=None),
        finished=newest.finished or home.finished or local.finished,
        shift=max(filter(None, (home.shift, local.shift)), key=_place_of_shift, default=None),
        shift_over=max(filter(None, (home.shift_over, local.shift_over)), default=None),
    )


def _place_of_shift(shift: OnCall) -> tuple[float, float]:
    """The later one counts; of the same one what was given back."""
    return shift.taken or 0.0, -(shift.until or 0.0)


def _open_in(alert_state: AlertState, other: AlertState) -> dict[str, Alert]:
    """The alerts of an alert state, by fingerprint, without the incidents that the other has put
    away as over.
    """
    over = {(one.fingerprint, one.began) for one in other.closed}
    return {
        alert.fingerprint: alert
        for alert in alert_state.alerts
        if (alert.fingerprint, alert.began) not in over
    }


def _later(one: Alert, other: Alert) -> Alert:
    """The alert as it was known last, with what a person has said of it meanwhile."""
    older, newer = sorted(
        (one, other), key=lambda alert: max(alert.last_seen, alert.resolved_at or 0.0)
    )
    if older.began != newer.began or newer.is_acknowledged or not older.is_acknowledged:
        return newer
    if (older.acknowledged_at or 0.0) < newer.opened:
        return newer
    return replace(newer.acknowledged_as(older), owner=newer.owner or older.owner)

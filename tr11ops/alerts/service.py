"""One look at the run becomes alerts, and alerts become messages: the alert state is kept, messages
are queued and sent.

Order of effects: the alert state (with the messages and journal entries that it calls for, in one
stroke), outbox and journal, the alert state without them, then the mail server. A kill between any
two of them loses nothing: the next look goes on from there. An entry of the journal may then be
there twice, under one `event`; a message may go out twice only when the kill fell between the
server's yes and its record.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from msgspec import field
from msgspec.structs import replace

from tr11ops.alerts.changes import Reply, apply_replies, put_away, read_replies, replies_folder
from tr11ops.alerts.incidents import SENT, look
from tr11ops.alerts.notify import tell
from tr11ops.alerts.outbox import OutboxEntry, queue, waiting, waiting_entries
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.sending import Sender, about
from tr11ops.alerts.situation import UNKNOWN_SITUATION, RunSituation, watchdog_says
from tr11ops.alerts.state import (
    WATCHDOG,
    Alert,
    AlertEvent,
    AlertState,
    HeldVerdict,
    Message,
    UndeliveredMessages,
    merged,
    stamp,
)
from tr11ops.alerts.store import alerts_folder, commit, read_alert_state
from tr11ops.alerts.url_route import ping
from tr11ops.base.observed import Unknown, cause, known, observed as read_observed
from tr11ops.detect.detector import Finding
from tr11ops.detect.registry import DETECTORS
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.fallback import fallback_of, require_room
from tr11ops.rundir.journal import who_looks
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.errors import NewerFormat
from trainer.contract.files import make_shared
from trainer.contract.record import Record

DELIVERY_SECONDS = 60.0  # of one look; what is left then waits for the next


class AlertOutcome(Record):
    """What one look did. `messages` were called for by this look; `suppressed`: they were not sent,
    as asked.

    `sent` counts deliveries, also of older messages. `notes` are one line each: what went wrong,
    and what is unusual.
    """

    open: tuple[Alert, ...] = ()
    messages: tuple[Message, ...] = ()
    suppressed: bool = False
    sent: int = 0
    waiting: UndeliveredMessages = field(default_factory=UndeliveredMessages)
    notes: tuple[str, ...] = ()


def process(
    sender: Sender, sight: AlertInput, deliver: bool = True, unmounted: str = ""
) -> AlertOutcome:
    """Take in a look at the run: keep the alert state, queue and send messages, call the dead-man
    URL.

    `deliver` False sends nothing: messages are recorded as suppressed, and the next look that may
    send says them. `unmounted`: why the run directory that is seen is not the run's, so that
    everything is kept on this machine. Nothing that disk, network or mail server do is raised: it
    is a note.
    """
    directory = sender.directory
    try:
        if unmounted:  # what is written there would be hidden when the run's own directory is back
            raise OSError(errno.ENODEV, unmounted)
        # nothing was launched from here, or its file system is not mounted: make nothing
        if not directory.exists:
            raise FileNotFoundError(errno.ENOENT, "there is no run directory", str(directory.root))
        # one that takes the alert state but no message would keep all quiet
        require_room(alerts_folder(directory))
        return _recorded(sender, sight, deliver)
    except (OSError, NewerFormat) as error:
        trouble = error
    if isinstance(trouble, OSError) and (unmounted or directory.exists):
        with suppress(OSError), fallback_of(directory) as local:
            lack = unmounted or f"the run directory cannot be written ({cause(trouble)})"
            note = f"{lack}: alerts are kept in {local.root}"
            home = None
            if not unmounted:
                home = directory
                _take_over(directory, local)
            here = replace(sender.policy, kept_in=str(local.root))
            done = _recorded(
                replace(sender, directory=local, policy=here), sight, deliver, home=home
            )
            return replace(done, notes=(note, *done.notes))
    return _without_record(sender, sight, deliver, trouble)


def process_some(sender: Sender, findings: Iterable[Finding]) -> AlertOutcome:
    """Take in findings of one kind, seen by themselves: no other alert is judged, none is closed
    (the pulse does that), and the dead-man URL is not called.
    """
    everybody = frozenset(detector.name for detector in DETECTORS)
    return process(sender, AlertInput(tuple(findings), everybody, observed=False))


class AlertInput(Record):
    """What one look found, `blind` detectors that could not judge, and how the run is doing, as
    messages say it. With `observed` False no detector could judge, and no absence counts.
    `verdict`: what it concluded of the run; None for a look at one thing alone.
    """

    found: tuple[Finding, ...]
    blind: frozenset[str]
    observed: bool
    situation: RunSituation = UNKNOWN_SITUATION
    verdict: HeldVerdict | None = None

    def of(self, alert_state: AlertState, policy: Policy, now: float) -> AlertState:
        """The alert state with this look taken in."""
        blind = self.blind
        situation = self.situation
        if not self.observed:
            blind |= {alert.detector for alert in alert_state.alerts}
        looked = look(
            alert_state,
            self.found,
            blind=blind,
            policy=policy,
            now=now,
            trained=situation.trained,
        )
        alerts = [_over_when_it_went_on(alert, situation, now) for alert in looked.alerts]
        if situation.knows_acts:
            alerts = [replace(alert, watchdog=watchdog_says(alert, situation)) for alert in alerts]
        return replace(looked, alerts=tuple(alerts), verdict=self._verdict(looked.verdict))

    def _verdict(self, before: HeldVerdict | None) -> HeldVerdict | None:
        if self.verdict is None:
            return before
        return self.verdict.after(before)


def _over_when_it_went_on(alert: Alert, situation: RunSituation, now: float) -> Alert:
    """An alert that this look is the first not to see: over since the training went on, if that was
    after the last look that saw it.
    """
    if alert.until != now:
        return alert
    step = situation.went_on(alert)
    if step is None or step.time is None or not alert.last_seen < step.time < now:
        return alert
    return replace(alert, until=step.time)


def _recorded(
    sender: Sender, sight: AlertInput, deliver: bool, home: RunDirectory | None = None
) -> AlertOutcome:
    """As `process`, with alert state, outbox and journal where the sender has them. Raises OSError
    or NewerFormat when that takes no alert state.

    `home` is the run directory that cannot be written, where the sender's is its fallback: what its
    alert state knows counts, and what it has not sent yet is sent from here.
    """
    store = sender.directory
    policy = sender.policy
    now = sender.now
    if home is None:
        known_there = AlertState()
    else:
        known_there = _known_state(home)
    notes: list[str] = []
    replies = _replies(store, notes)
    before = known(waiting(store), None)

    def change(
        alert_state: AlertState,
    ) -> tuple[AlertState, tuple[tuple[Message, ...], dict[str, str]]]:
        if home is not None:
            alert_state = merged(
                known_there if alert_state.looked is None else replace(known_there, events=()),
                alert_state,
            )
        answered, refused = apply_replies(alert_state, replies, now)
        looked = replace(sight.of(answered, policy, now), looked_by=who_looks())
        after, messages = tell(looked, policy, now, before, situation=sight.situation)
        if not deliver:
            after = looked.with_events(_suppressed(looked, message, now) for message in messages)
        return after, (messages, refused)

    stored, (messages, refused) = commit(store, change)
    if stored.damage:
        notes.append(
            f"{stored.damage}; what could be read was used, and some messages may come again"
        )
    notes += put_away(store, replies, refused)
    if not policy.is_reachable:
        notes.append("no one is told of anything: set alerts.recipients in the card")
    mine = messages
    if home is not None:
        mine = stored.alert_state.messages
    if not deliver:
        mine = ()
    notes += sender.flush(stored, mine)
    sent = 0
    if deliver:
        sent, troubles = sender.send(stored.alert_state, DELIVERY_SECONDS)
        notes += troubles
    if sight.observed:
        notes += _ping(sender.card)
    left = waiting(store)
    if isinstance(left, Unknown) and not any(left.why in note for note in notes):
        notes.append(f"outbox: {left.why}")
    return AlertOutcome(
        open=stored.alert_state.open_alerts,
        messages=messages,
        suppressed=not deliver,
        sent=sent,
        waiting=known(left, UndeliveredMessages()),
        notes=tuple(notes),
    )


def _known_state(directory: RunDirectory) -> AlertState:
    """The alert state; an empty one where it cannot be read."""
    return known(read_observed(lambda: read_alert_state(directory).alert_state), AlertState())


def _take_over(directory: RunDirectory, local: RunDirectory) -> None:
    """Queue in the fallback directory the messages of an outbox that takes no claim. Raises
    OSError.
    """
    for entry in known(read_observed(waiting_entries, directory), ()):
        queue(local, entry.message, (entry.route,))


def _replies(directory: RunDirectory, notes: list[str]) -> tuple[Reply, ...]:
    try:
        make_shared(replies_folder(directory))  # the mails name it
        return read_replies(directory)
    except OSError as error:
        notes.append(f"answers by file: {cause(error)}")
        return ()


def _suppressed(alert_state: AlertState, message: Message, now: float) -> AlertEvent:
    data = {**about(alert_state, message), "suppressed": True}
    return AlertEvent(
        f"{message.id}-suppressed-{stamp(now)}",
        SENT,
        who=WATCHDOG,
        why="suppressed: no mail was wanted",
        time=now,
        data=data,
    )


def _without_record(
    sender: Sender, sight: AlertInput, deliver: bool, trouble: Exception
) -> AlertOutcome:
    """Where nothing can be written, those on duty hear of it all the same, though at each look
    again.
    """
    notes = [f"alerts cannot be recorded, so messages go out again at each look: {cause(trouble)}"]
    if sight.observed:
        notes += _ping(sender.card)
    policy = sender.policy
    now = sender.now
    looked = sight.of(_known_state(sender.directory), policy, now)
    names = frozenset(alert.fingerprint for alert in looked.alerts)
    after, messages = tell(looked, policy, now, only=names, situation=sight.situation)
    sent = 0
    away = set[str]()
    for message in messages if deliver else ():
        for route in sender.routes():
            if route.name in sender.routes_of(message) and route.name not in away:
                report = route.send(OutboxEntry(message, route.name, left=message.to))
                sent += report.is_over
                if report.is_unreachable:
                    away.add(route.name)
                if report.trouble:
                    notes.append(f"{route.name}: {report.trouble}")
    return AlertOutcome(
        open=after.open_alerts,
        messages=messages,
        suppressed=not deliver,
        sent=sent,
        notes=tuple(notes),
    )


def _ping(card: RunCard) -> list[str]:
    if card.alerts.dead_man_url_file is None:
        return []
    trouble = ping(Path(card.alerts.dead_man_url_file))
    if trouble:
        return [f"dead-man call: {trouble}"]
    return []

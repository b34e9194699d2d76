"""One look at the run becomes alerts, and alerts become messages: the book is kept, messages are queued and sent.

Order of effects: the book (with the messages and journal entries that it calls for, in one stroke), outbox and journal,
the book without them, then the mail server. A kill between any two of them loses nothing: the next look goes on from
there. An entry of the journal may then be there twice, under one `event`; a message may go out twice only when the kill
fell between the server's yes and its record.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.alerts import dead_man
from tr11ops.alerts.book import Alert, Book, Event, Message, stamp
from tr11ops.alerts.incidents import WATCHDOG, look
from tr11ops.alerts.outbox import Entry
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.reading import Waiting, backlog, waiting
from tr11ops.alerts.replies import Reply, apply_replies, put_away, read_replies
from tr11ops.alerts.sending import SENT, about, flush, policy_for, routes, routes_of, send_waiting
from tr11ops.alerts.store import NewerSchema, commit, read_book
from tr11ops.alerts.telling import tell
from tr11ops.detect.finding import Finding
from tr11ops.evidence import cause
from tr11ops.evidence import observed as read_observed
from tr11ops.rundir import RunDirectory
from tr11ops.snapshot import Unknown

if TYPE_CHECKING:
    from tr11ops.runcard import RunCard

DELIVERY_SECONDS = 60.0  # of one look; what is left then waits for the next


@dataclass(frozen=True)
class Outcome:
    """What one look did. `messages` were called for by this look; `suppressed`: they were not sent, as asked.

    `sent` counts deliveries, also of older messages. `notes` are one line each: what went wrong, and what is unusual.
    """

    open: tuple[Alert, ...] = ()
    messages: tuple[Message, ...] = ()
    suppressed: bool = False
    sent: int = 0
    waiting: Waiting = field(default_factory=Waiting)
    notes: tuple[str, ...] = ()


def process(
    directory: RunDirectory,
    card: RunCard,
    findings: Iterable[Finding],
    blind: frozenset[str],
    observed: bool,
    now: float,
    deliver: bool = True,
    typed: str = "",
) -> Outcome:
    """Take in a look at the run at `now`: keep the book, queue and send messages, call the dead-man URL.

    `blind` are the detectors that could not judge; with `observed` False no detector could, and no absence counts.
    `deliver` False sends nothing: messages are recorded as suppressed, and the next look that may send says them.
    `typed` is the card as the person named it. Nothing that disk, network or mail server do is raised: it is a note.
    """
    policy = policy_for(directory, card, typed)
    found = tuple(findings)
    notes: list[str] = []
    replies = _replies(directory, notes)
    before = backlog(directory)

    def change(book: Book) -> tuple[Book, tuple[tuple[Message, ...], dict[str, str]]]:
        answered, refused = apply_replies(book, replies, now)
        looked = look(answered, found, _blind(answered, blind, observed), policy, now)
        after, messages = tell(looked, policy, now, before)
        if not deliver:
            after = looked.with_events(_suppressed(looked, message, now) for message in messages)
        return after, (messages, refused)

    try:
        if not directory.exists:  # nothing was launched from here, or its file system is not mounted: make nothing
            raise FileNotFoundError(errno.ENOENT, "there is no run directory", str(directory.root))
        stored, (messages, refused) = commit(directory, change)
    except (OSError, NewerSchema) as error:
        notes.append(f"alerts cannot be recorded, so messages go out anew at each look: {cause(error)}")
        notes += _ping(card) if observed else []
        last = read_observed(lambda: read_book(directory).book)
        book = Book() if isinstance(last, Unknown) else last
        looked = look(book, found, _blind(book, blind, observed), policy, now)
        return _without_record(card, policy, looked, now, deliver, notes)
    if stored.damage:
        notes.append(f"{stored.damage}; what could be read was used, and some messages may come again")
    notes += put_away(directory, replies, refused)
    if not policy.is_reachable:
        notes.append("nobody is told of anything: set alerts.recipients in the card")
    notes += flush(directory, stored, messages if deliver else (), policy, now)
    sent = 0
    if deliver:
        sent, troubles = send_waiting(directory, card, policy, stored.book, now, DELIVERY_SECONDS)
        notes += troubles
    if observed:
        notes += _ping(card)
    left = waiting(directory)
    if isinstance(left, Unknown) and not any(left.why in note for note in notes):
        notes.append(f"outbox: {left.why}")
    return Outcome(
        open=stored.book.open_alerts,
        messages=messages,
        suppressed=not deliver,
        sent=sent,
        waiting=Waiting() if isinstance(left, Unknown) else left,
        notes=tuple(notes),
    )


def _replies(directory: RunDirectory, notes: list[str]) -> tuple[Reply, ...]:
    try:
        return read_replies(directory)
    except OSError as error:
        notes.append(f"answers by file: {cause(error)}")
        return ()


def _suppressed(book: Book, message: Message, now: float) -> Event:
    data = {**about(book, message), "suppressed": True}
    return Event(f"{message.id}-suppressed-{stamp(now)}", SENT, WATCHDOG, "suppressed: no mail was wanted", now, data)


def _blind(book: Book, blind: frozenset[str], observed: bool) -> frozenset[str]:
    """Who could not judge: everybody, where nothing was observed."""
    return blind if observed else blind | {alert.detector for alert in book.alerts}


def _without_record(
    card: RunCard, policy: Policy, looked: Book, now: float, deliver: bool, notes: list[str]
) -> Outcome:
    """Where nothing can be written, those on duty hear of it all the same, though at each look again."""
    after, messages = tell(looked, policy, now, only=frozenset(alert.fingerprint for alert in looked.alerts))
    sent = 0
    for message in messages if deliver else ():
        for route in routes(card, policy, lambda: now):
            if route.name in routes_of(message, policy):
                report = route.send(Entry(message, route.name, left=message.to))
                sent += report.is_over
                notes += [f"{route.name}: {report.trouble}"] if report.trouble else []
    return Outcome(open=after.open_alerts, messages=messages, suppressed=not deliver, sent=sent, notes=tuple(notes))


def _ping(card: RunCard) -> list[str]:
    if card.alerts.dead_man_url_file is None:
        return []
    trouble = dead_man.ping(Path(card.alerts.dead_man_url_file))
    return [f"dead-man call: {trouble}"] if trouble else []

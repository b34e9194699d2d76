"""What people do about alerts: acknowledge, snooze, assign, close, by command and by file; by
command also the shift, a test of every route, and the digest.

`apply` is pure: from an alert state to the alert state after it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from tr11ops.alerts.incidents import (
    ACKNOWLEDGED,
    ASSIGNED,
    RESOLVED,
    SHIFT_ENDED,
    SHIFT_TAKEN,
    SNOOZED,
)
from tr11ops.alerts.mail_route import is_address
from tr11ops.alerts.mail_text.alert import AlertMails
from tr11ops.alerts.mail_text.daily_summary import RunMails
from tr11ops.alerts.mail_text.shared import clean
from tr11ops.alerts.notify import digest_due, tell, told
from tr11ops.alerts.outbox import OutboxEntry, waiting
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.situation import RunSituation
from tr11ops.alerts.state import (
    Alert,
    AlertEvent,
    AlertState,
    Message,
    MessagePart,
    OnCall,
    event_of,
    merged,
    stamp,
)
from tr11ops.alerts.store import (
    alerts_folder,
    commit,
    current_alert_state,
    kept_here,
    read_alert_state,
)
from tr11ops.base.errors import NoSuchAlert
from tr11ops.base.observed import cause, known
from tr11ops.base.units import span_seconds, timestamp
from tr11ops.rundir.fallback import fallback_of
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import make_shared, user_of
from trainer.contract.record import Record

T = TypeVar("T")
LONGEST_WHO = 100
LONGEST_WHY = 300
SHORTEST_PREFIX = 3
_INCIDENT = re.compile(r"([^-]*)-([0-9a-f]{1,16})")
LONGEST_SNOOZE = 90 * 86_400.0


def resolve_prefix(alert_state: AlertState, typed: str) -> Alert:
    """The open alert that a fingerprint, or the beginning of one, names, or the name of its incident
    (`Alert.incident`): not that of one before it. Raises NoSuchAlert.
    """
    shown = clean(typed, 40)
    named = _INCIDENT.fullmatch(typed.lower())
    prefix, began = (typed.lower(), None) if named is None else named.groups()
    found = [
        alert
        for alert in alert_state.open_alerts
        if any(name.startswith(prefix) for name in alert.names)
    ]
    if len(prefix) < SHORTEST_PREFIX:
        raise NoSuchAlert(
            f"{shown!r} is too short for a fingerprint: type three characters or more of it"
        )
    if len(found) > 1:
        names = ", ".join(alert.fingerprint for alert in found[:4])
        raise NoSuchAlert(
            f"{shown!r} is the beginning of {len(found)} open alerts ({names}): type more of it"
        )
    if not found:
        over = any(name.startswith(prefix) for alert in alert_state.alerts for name in alert.names)
        raise NoSuchAlert(
            f"{shown!r} is "
            + ("over already" if over else "not an open alert; see: tr11 alerts list")
        )
    # of an incident that another one was joined with, the beginning may have moved back, never on
    if began is not None and int(began, 16) < int(stamp(found[0].began), 16):
        since = timestamp(found[0].start, None)
        raise NoSuchAlert(
            f"{shown!r} is over; another incident of that kind is open since {since}: "
            "look at it first (tr11 alerts list)"
        )
    return found[0]


class AlertChange(Record):
    """What a person does about an alert: `kind` is the journal's word for it, `who` does it and why.

    `seconds`: how long a snooze lasts; `owner`: whom it is assigned to.
    """

    kind: str
    who: str = ""
    why: str = ""
    seconds: float = 0.0
    owner: str = ""

    def of(self, alert: Alert, now: float) -> Alert:
        """The alert after it."""
        who = clean(self.who, LONGEST_WHO)
        why = clean(self.why, LONGEST_WHY)
        if self.kind == SNOOZED:
            return replace(alert, snoozed_until=now + self.seconds, snoozed_by=who, remind=False)
        if self.kind == ASSIGNED:
            return replace(alert, owner=clean(self.owner, LONGEST_WHO))
        if self.kind == RESOLVED:
            return replace(alert, resolved_at=now, until=now, resolved_by=who, resolved_why=why)
        return replace(
            alert,
            owner=alert.owner if is_same_person(alert.owner, who) else "",
            acknowledged_by=who,
            acknowledged_at=now,
            acknowledged_why=why,
            first_acknowledged_by=alert.first_acknowledged_by or who,
            remind=False,
        )


def is_same_person(one: str, other: str) -> bool:
    """Whether two names, each an address or what stands before its @, may be one person's."""
    first, second = one.partition(" ")[0], other.partition(" ")[0]
    if "@" in first and "@" in second:
        return first == second
    return first.partition("@")[0] == second.partition("@")[0]


def apply(
    alert_state: AlertState, fingerprint: str, change: AlertChange, who: str, why: str, now: float
) -> AlertState:
    """The alert state after one person's change of one alert, with its entry for the journal, which
    has `who` typed it and `why`.
    """
    after = change.of(resolve_prefix(alert_state, fingerprint), now)
    more: dict[str, float | str | None] = {}
    if change.kind == SNOOZED:
        more["until"] = after.snoozed_until
    elif change.kind == ASSIGNED:
        more["owner"] = after.owner
    event = event_of(
        after,
        change.kind,
        who=clean(who, LONGEST_WHO),
        why=clean(why, LONGEST_WHY),
        now=now,
        **more,
    )
    return alert_state.with_alert(after).with_events((event,))


def seconds_of(text: str) -> float:
    """Seconds of a length of time as people type it: 30m, 2h, 1.5d. Raises ValueError when it is
    none.
    """
    try:
        seconds = span_seconds(text, None)
    except ValueError:
        raise ValueError(
            f"{clean(text, 40)!r} is not a length of time; use 30m, 2h or 1d"
        ) from None
    if not 0 < seconds <= LONGEST_SNOOZE:
        raise ValueError(f"{clean(text, 40)!r} must be above 0 and at most 90d")
    return seconds


# ----------------------------------------------------------------------------- answers by file
# What people without a shell here drop into state/alerts/replies/ is done at the next look.
#
# A file holds one line, `ack FINGERPRINT why` (or `resolve`, `snooze FINGERPRINT 2h why`, `assign
# FINGERPRINT WHO why`), or a JSON object of action, fingerprint, who, why, and for or to. It is moved
# to done/ or refused/ below the folder.

LARGEST_BYTES = 64 << 10
MOST_AT_ONCE = 200
_KINDS = {"ack": ACKNOWLEDGED, "snooze": SNOOZED, "assign": ASSIGNED, "resolve": RESOLVED}
SETTLED_SECONDS = 120.0  # a younger file that makes no sense may be still on its way


class Reply(Record):
    """One file: what it asks for of which alert, or why it asks for nothing (`fault`). `name` is the
    file's.
    """

    name: str
    fingerprint: str = ""
    change: AlertChange = AlertChange(ACKNOWLEDGED)
    fault: str = ""

    @property
    def shown(self) -> str:
        """The file's name, fit for a line of text."""
        return clean(self.name.encode("utf-8", "backslashreplace").decode("utf-8"), 80)


def replies_folder(directory: RunDirectory) -> Path:
    return alerts_folder(directory) / "replies"


def read_replies(directory: RunDirectory) -> tuple[Reply, ...]:
    """The files that wait, by name. Raises OSError when the folder cannot be read."""
    folder = replies_folder(directory)
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
    except FileNotFoundError:
        return ()
    files = [name for name in names if name not in {"done", "refused"}][:MOST_AT_ONCE]
    found = (_read(folder, name) for name in files)
    return tuple(reply for reply in found if reply is not None)


def _read(folder: Path, name: str) -> Reply | None:
    """One file; None where it makes no sense but may be still on its way."""
    try:
        content, facts = _content(folder / name)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Reply(name, fault=error.strerror or "cannot be read")
    try:
        return parse(name, content.decode("utf-8"), user_of(facts.st_uid))
    except UnicodeDecodeError:
        fault = "is not UTF-8 text"
    except (ValueError, RecursionError) as error:
        fault = clean(str(error), 120)
    if time.time() - facts.st_mtime < SETTLED_SECONDS:
        return None
    return Reply(name, fault=fault)


def _content(path: Path) -> tuple[bytes, os.stat_result]:
    """Raises OSError; also where it is no plain file, or too large to be an answer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "is not a file")
        if facts.st_size > LARGEST_BYTES:
            raise OSError(errno.EFBIG, "is too large for an answer")
        return os.read(descriptor, LARGEST_BYTES), facts
    finally:
        os.close(descriptor)


def parse(name: str, text: str, owner: str) -> Reply:
    """What a file asks for; `owner` is the user that it belongs to. Raises ValueError when it asks
    for nothing.
    """
    text, who, argument = text.strip(), owner, ""
    if text.startswith("{"):
        value: dict[str, Any] = json.loads(text)
        action = str(value.get("action") or "ack")
        fingerprint = str(value.get("fingerprint") or value.get("ack") or "")
        claimed = str(value.get("who") or "")
        if claimed not in {"", owner}:
            who = f"{claimed} (file of {owner})"
        why = str(value.get("why") or value.get("reason") or "")
        argument = str(value.get("for") or value.get("to") or "")
    else:
        action, _, rest = text.partition("\n")[0].partition(" ")
        fingerprint, _, rest = rest.strip().partition(" ")
        why = rest.strip()
        if action in {"snooze", "assign"}:
            argument, _, why = why.partition(" ")
    if action not in _KINDS or not fingerprint:
        raise ValueError("says neither ack, snooze, assign nor resolve with a fingerprint")
    change = AlertChange(_KINDS[action], who, why)
    if action == "snooze":
        change = replace(change, seconds=seconds_of(argument))
    elif action == "assign" and not argument:
        raise ValueError("does not say to whom")
    elif action == "assign":
        change = replace(change, owner=argument)
    return Reply(name, fingerprint, change)


def apply_replies(
    alert_state: AlertState, replies: Iterable[Reply], now: float
) -> tuple[AlertState, dict[str, str]]:
    """The alert state after all answers, and why those that were refused were, by file name."""
    refused: dict[str, str] = {}
    for reply in replies:
        try:
            if reply.fault:
                raise ValueError(reply.fault)
            change = reply.change
            if change.kind == RESOLVED and not change.why:
                change = replace(change, why="closed by file")
            why = reply.change.why or f"answer by file {reply.shown}"
            alert_state = apply(
                alert_state, reply.fingerprint, change, who=change.who, why=why, now=now
            )
        except ValueError as error:
            refused[reply.name] = clean(str(error), 200)
    return alert_state, refused


def put_away(
    directory: RunDirectory, replies: Iterable[Reply], refused: dict[str, str]
) -> tuple[str, ...]:
    """Move the files out of the way; returns one line for each that was refused, or that could not
    be moved.
    """
    folder = replies_folder(directory)
    notes = []
    for reply in replies:
        target = folder / ("refused" if reply.name in refused else "done")
        try:
            make_shared(target)
            with suppress(FileNotFoundError):
                (folder / reply.name).replace(target / reply.name)
        except OSError as error:
            notes.append(f"answer {reply.shown}: cannot be moved away: {error.strerror}")
        if reply.name in refused:
            notes.append(f"answer {reply.shown}: {refused[reply.name]}")
    return tuple(notes)


# ----------------------------------------------------------------------------- by command

PERSON_SECONDS = 15.0  # while someone waits at the prompt


def change_alerts(
    sender: Sender, typed: Iterable[str], wanted: AlertChange, who: str, why: str
) -> tuple[tuple[Alert, ...], tuple[str, ...]]:
    """Do what a person asks for of the alerts that were `typed` (the beginning of a fingerprint is
    enough), all of it or nothing; returns the alerts after it, and notes. The journal has `who`
    typed it, and `why`.

    Those who were told hear that an alert is closed, and who is given one that it is theirs. Raises
    NoSuchAlert, and else as `_committed`.
    """
    policy = sender.policy
    now = sender.now
    asked = tuple(typed)

    def change(
        alert_state: AlertState,
    ) -> tuple[AlertState, tuple[tuple[str, ...], tuple[Message, ...]]]:
        names = tuple(dict.fromkeys(resolve_prefix(alert_state, one).fingerprint for one in asked))
        before = {name: alert_state.find(name) for name in names}
        for name in names:
            alert_state = apply(alert_state, name, wanted, who=who, why=why, now=now)
        alert_state, assigned = _assignments(alert_state, before, policy, now)
        alert_state, messages = tell(alert_state, policy, now, only=frozenset(names))
        return alert_state, (names, (*assigned, *messages))

    stored, names, notes = _committed(sender, change)
    alerts = (stored.find(name) for name in names)
    return tuple(alert for alert in alerts if alert is not None), notes


def change_shift(
    sender: Sender, taken: OnCall | None, who: str, why: str
) -> tuple[OnCall, tuple[str, ...]]:
    """Put a shift in place of the one on record, or end that (None): returns who is on call then, and
    notes. The journal has `who` typed it, and `why`.

    Those who were on call and those who are now hear of it. Raises as `_committed`.
    """
    policy, now = sender.policy, sender.now

    def change(
        alert_state: AlertState,
    ) -> tuple[AlertState, tuple[OnCall, tuple[Message, ...]]]:
        shift, over = taken, None
        if shift is None and alert_state.shift is not None:
            shift, over = replace(alert_state.shift, until=now), now
        before, after = policy.on_call(alert_state.shift, now), policy.on_call(shift, now)
        kind = SHIFT_ENDED if taken is None else SHIFT_TAKEN
        data = {"before": list(before.who), "on_call": list(after.who), "until": after.until}
        reason = clean(why, LONGEST_WHY)
        event = AlertEvent(
            f"{kind}-{stamp(now)}",
            kind,
            who=clean(who, LONGEST_WHO),
            why=reason,
            time=now,
            data=data,
        )
        told = f"By {event.who}{reason and f': {reason}'}."
        stored = replace(alert_state, shift=shift, shift_over=over)
        message = RunMails(policy, now).shift(before, stored, told)
        messages = (message,) if message.to else ()
        stored = replace(stored, messages=(*alert_state.messages, *messages))
        return stored.with_events((event,)), (after, messages)

    _, after, notes = _committed(sender, change)
    return after, notes


def _committed(
    sender: Sender, change: Callable[[AlertState], tuple[AlertState, tuple[T, tuple[Message, ...]]]]
) -> tuple[AlertState, T, tuple[str, ...]]:
    """Keep what a person has changed, where the run directory or else this machine takes it, and send
    the messages; returns the alert state, what else `change` returned, and notes.

    Raises OSError as the file system does, and ValueError when the alert state was written by a
    newer tr11.
    """

    def carry_out(
        here: Sender,
        known_there: AlertState = AlertState(),  # noqa: B008  frozen
    ) -> tuple[AlertState, T, tuple[str, ...]]:
        stored, (found, messages) = commit(
            here.directory, lambda alert_state: change(merged(known_there, alert_state))
        )
        notes = here.carry_out(stored, messages, PERSON_SECONDS)
        return stored.alert_state, found, tuple(notes)

    trouble: OSError | None = None
    if kept_here(sender.directory) is None:
        try:
            return carry_out(sender)
        except OSError as error:
            trouble = error
    with fallback_of(sender.directory) as local:
        home = read_alert_state(sender.directory).alert_state
        kept, found, notes = carry_out(
            replace(sender, directory=local), replace(home, messages=(), events=())
        )
        if trouble is None:
            lack = ""
        else:
            lack = f" ({cause(trouble)})"
        note = f"the run directory cannot be written{lack}: this is kept in {local.root}, until the watchdog can"
        return kept, found, (*notes, note)


def _assignments(
    alert_state: AlertState, before: dict[str, Alert | None], policy: Policy, now: float
) -> tuple[AlertState, tuple[Message, ...]]:
    """Tell those who have just been given an alert, and those who had it before, where mail reaches
    them.
    """
    messages: list[Message] = []
    for name, old in before.items():
        alert = alert_state.find(name)
        if alert is None or old is None:
            continue
        former = policy.address_of(old.care.person)
        for kind, address, is_news in (
            ("taken-over", former, not is_same_person(old.holder, alert.holder)),
            ("assigned", alert.owner, alert.owner != old.owner),
        ):
            if is_news and alert.is_open and is_address(address):
                part = MessagePart(alert, kind, (address,))
                message = AlertMails(policy, now).message((part,), part.to)
                messages.append(message)
                alert = told(part, (message,), now)
        alert_state = alert_state.with_alert(alert)
    return replace(alert_state, messages=(*alert_state.messages, *messages)), tuple(messages)


def send_test(sender: Sender, to: tuple[str, ...]) -> tuple[tuple[str, str, str], ...]:
    """Send a test message on every route, at once; (route, to whom, trouble or "") of each."""
    mail, urls = sender.routes()
    results: list[tuple[str, str, str]] = []
    message = RunMails(sender.policy, sender.now).trial(to or sender.policy.everyone)
    for address in message.to:
        report = mail.send(OutboxEntry(replace(message, to=(address,)), "mail", left=(address,)))
        results.append(("mail", address, "" if report.done else report.trouble or "was not taken"))
    if not to:
        results += [("urls", name, trouble) for name, trouble in urls.send_each(message)]
    return tuple(results)


def send_what_waits(sender: Sender, taken: frozenset[str]) -> tuple[int, tuple[str, ...]]:
    """Send what waits on routes that have just taken a message, however often it failed: how many,
    and troubles.
    """
    if not taken or not sender.directory.exists:
        return 0, ()
    try:
        alert_state = read_alert_state(sender.directory).alert_state
    except (OSError, ValueError) as error:
        return 0, (f"the messages that wait could not be sent: {cause(error)}",)
    sent, troubles = sender.send(alert_state, PERSON_SECONDS, proven=taken)
    return sent, tuple(troubles)


def send_digest(
    sender: Sender, situation: RunSituation, again: bool
) -> tuple[Message | None, tuple[str, ...]]:
    """Send the daily summary that is due; with `again` also one that went out already.

    Returns it, or None when it went out before, and notes. Raises OSError and ValueError as
    `change_alerts`.
    """
    policy = sender.policy
    now = sender.now
    mails = RunMails(policy, now, situation)
    left = known(waiting(sender.directory), None)

    def change(alert_state: AlertState) -> tuple[AlertState, Message | None]:
        done, due = digest_due(alert_state, policy, now)
        if again:
            done, due = alert_state, now
        if due is None:
            return done, None
        message = mails.digest_message(alert_state, due, left)
        return replace(done, messages=(*done.messages, message)), message

    stored, message = commit(sender.directory, change)
    if message is None:
        return None, ()
    return message, tuple(sender.carry_out(stored, (message,), PERSON_SECONDS))


def read_digest(sender: Sender, situation: RunSituation) -> tuple[str, tuple[str, ...]]:
    """Subject and lines of the summary as it is now. Raises OSError and ValueError as
    `read_alert_state` does.
    """
    backlog = known(waiting(sender.directory), None)
    mails = RunMails(sender.policy, sender.now, situation)
    return mails.digest(current_alert_state(sender.directory), backlog)

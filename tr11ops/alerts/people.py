"""What people ask of the alerts by command: changes, a test of every route, the digest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.alerts.changes import Change, apply, resolve_prefix
from tr11ops.alerts.grouping import MessagePart
from tr11ops.alerts.mail_route import is_address
from tr11ops.alerts.mail_text.alert import alert_message
from tr11ops.alerts.mail_text.daily_summary import digest, digest_message, trial_message
from tr11ops.alerts.notify import digest_readers, tell, told
from tr11ops.alerts.outbox import OutboxEntry
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.reading import current_alert_state, kept_here, waiting
from tr11ops.alerts.sending import flush, policy_for, routes, send_waiting
from tr11ops.alerts.situation import UNKNOWN_SITUATION, RunSituation
from tr11ops.alerts.state import Alert, AlertState, Message, merged
from tr11ops.alerts.store import commit, read_alert_state
from tr11ops.alerts.url_route import UrlRoute
from tr11ops.base.observed import cause, known
from tr11ops.rundir.fallback import fallback_of
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

PERSON_SECONDS = 15.0  # while someone waits at the prompt


class PersonalChange(Record):
    """What a person asks for: `fingerprint` may be the beginning of one."""

    fingerprint: str
    change: Change
    kind: str
    who: str
    why: str


def change_alerts(
    directory: RunDirectory,
    card: RunCard,
    wanted: Iterable[PersonalChange],
    now: float,
    typed: str = "",
) -> tuple[tuple[Alert, ...], tuple[str, ...]]:
    """Do what a person asks for, all of it or nothing; returns the alerts after it, and notes.

    Those who were told hear that an alert is closed, and who is given one that it is theirs. Raises
    NoSuchAlert, OSError as the file system does, and ValueError when the alert state was written by
    a newer tr11.
    """
    policy = policy_for(directory, card, typed)
    asked = tuple(wanted)

    def change(
        alert_state: AlertState,
    ) -> tuple[AlertState, tuple[tuple[str, ...], tuple[Message, ...]]]:
        names = tuple(
            dict.fromkeys(resolve_prefix(alert_state, one.fingerprint).fingerprint for one in asked)
        )
        before = {name: alert_state.find(name) for name in names}
        for one in asked:
            name = resolve_prefix(alert_state, one.fingerprint).fingerprint
            alert_state = apply(
                alert_state,
                name,
                change=one.change,
                kind=one.kind,
                who=one.who,
                why=one.why,
                now=now,
            )
        alert_state, assigned = _assignments(alert_state, before, policy, now)
        alert_state, messages = tell(alert_state, policy, now, only=frozenset(names))
        return alert_state, (names, (*assigned, *messages))

    def carry_out(
        store: RunDirectory,
        known_there: AlertState = AlertState(),  # noqa: B008  frozen
    ) -> tuple[tuple[Alert, ...], tuple[str, ...]]:
        stored, (names, messages) = commit(
            store, lambda alert_state: change(merged(known_there, alert_state))
        )
        notes = flush(store, stored, mine=messages, policy=policy, now=now)
        if messages:
            ids = frozenset(message.id for message in messages)
            notes += send_waiting(
                store,
                card,
                policy=policy,
                alert_state=stored.alert_state,
                now=now,
                seconds=PERSON_SECONDS,
                only=ids,
            )[1]
        alerts = (stored.alert_state.find(name) for name in names)
        return tuple(alert for alert in alerts if alert is not None), tuple(notes)

    trouble: OSError | None = None
    if kept_here(directory) is None:
        try:
            return carry_out(directory)
        except OSError as error:
            trouble = error
    with fallback_of(directory) as local:
        alerts, notes = carry_out(
            local, replace(read_alert_state(directory).alert_state, messages=(), events=())
        )
        if trouble is None:
            why = ""
        else:
            why = f" ({cause(trouble)})"
        kept = f"the run directory cannot be written{why}: this is kept in {local.root}, until the watchdog can"
        return alerts, (*notes, kept)


def _assignments(
    alert_state: AlertState, before: dict[str, Alert | None], policy: Policy, now: float
) -> tuple[AlertState, tuple[Message, ...]]:
    """Tell those who have just been given an alert, where their name is a mail address."""
    messages: list[Message] = []
    for name, old in before.items():
        alert = alert_state.find(name)
        if alert is None or old is None or alert.owner == old.owner or not is_address(alert.owner):
            continue
        part = MessagePart(alert, "assigned", (alert.owner,))
        message = alert_message((part,), part.to, policy, now)
        messages.append(message)
        alert_state = alert_state.with_alert(told(part, (message,), now))
    return replace(alert_state, messages=(*alert_state.messages, *messages)), tuple(messages)


def send_test(
    directory: RunDirectory, card: RunCard, to: tuple[str, ...], now: float, typed: str = ""
) -> tuple[tuple[str, str, str], ...]:
    """Send a test message on every route, at once; (route, to whom, trouble or "") of each."""
    policy = policy_for(directory, card, typed)
    mail, urls = routes(card, policy, lambda: now)
    results: list[tuple[str, str, str]] = []
    message = trial_message(to or policy.everyone, policy, now)
    for address in message.to:
        report = mail.send(OutboxEntry(replace(message, to=(address,)), "mail", left=(address,)))
        results.append(("mail", address, "" if report.done else report.trouble or "was not taken"))
    if isinstance(urls, UrlRoute) and not to:
        results += [("urls", name, trouble) for name, trouble in urls.send_each(message)]
    return tuple(results)


def send_what_waits(
    directory: RunDirectory, card: RunCard, taken: frozenset[str], now: float, typed: str = ""
) -> tuple[int, tuple[str, ...]]:
    """Send what waits on routes that have just taken a message, however often it failed: how many,
    and troubles.
    """
    if not taken or not directory.exists:
        return 0, ()
    try:
        alert_state = read_alert_state(directory).alert_state
    except (OSError, ValueError) as error:
        return 0, (f"the messages that wait could not be sent: {cause(error)}",)
    policy = policy_for(directory, card, typed)
    sent, troubles = send_waiting(
        directory,
        card,
        policy=policy,
        alert_state=alert_state,
        now=now,
        seconds=PERSON_SECONDS,
        proven=taken,
    )
    return sent, tuple(troubles)


def send_digest(
    directory: RunDirectory,
    card: RunCard,
    now: float,
    again: bool = False,
    typed: str = "",
    situation: RunSituation = UNKNOWN_SITUATION,
) -> tuple[Message | None, tuple[str, ...]]:
    """Send the daily summary that is due; with `again` also one that went out already.

    Returns it, or None when it went out before, and notes. Raises OSError and ValueError as
    `change_alerts`.
    """
    policy = policy_for(directory, card, typed)
    left = known(waiting(directory), None)

    def change(alert_state: AlertState) -> tuple[AlertState, Message | None]:
        due = now if again else policy.digest_moment(now)
        if due is None or (
            not again and alert_state.digested is not None and due <= alert_state.digested
        ):
            return alert_state, None
        message = digest_message(
            alert_state,
            digest_readers(policy, now),
            policy=policy,
            now=now,
            due=due,
            backlog=left,
            situation=situation,
        )
        digested = alert_state.digested if again else due
        return replace(
            alert_state, digested=digested, messages=(*alert_state.messages, message)
        ), message

    stored, message = commit(directory, change)
    if message is None:
        return None, ()
    notes = flush(directory, stored, mine=(message,), policy=policy, now=now)
    _, troubles = send_waiting(
        directory,
        card,
        policy=policy,
        alert_state=stored.alert_state,
        now=now,
        seconds=PERSON_SECONDS,
        only=frozenset({message.id}),
    )
    return message, (*notes, *troubles)


def read_digest(
    directory: RunDirectory,
    card: RunCard,
    now: float,
    typed: str = "",
    situation: RunSituation = UNKNOWN_SITUATION,
) -> tuple[str, tuple[str, ...]]:
    """Subject and lines of the summary as it is now. Raises OSError and ValueError as
    `read_alert_state` does.
    """
    left = known(waiting(directory), None)
    return digest(
        current_alert_state(directory),
        policy_for(directory, card, typed),
        now=now,
        backlog=left,
        situation=situation,
    )

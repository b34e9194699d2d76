"""What people ask of the alerts by command: changes, a test of every route, the digest."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from tr11ops.alerts.changes import AlertChange, apply, resolve_prefix
from tr11ops.alerts.grouping import MessagePart
from tr11ops.alerts.mail_route import is_address
from tr11ops.alerts.mail_text.alert import AlertMails
from tr11ops.alerts.mail_text.daily_summary import digest, digest_message, trial_message
from tr11ops.alerts.notify import digest_readers, tell, told
from tr11ops.alerts.outbox import OutboxEntry
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.reading import current_alert_state, kept_here, waiting
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.situation import RunSituation
from tr11ops.alerts.state import Alert, AlertState, Message, merged
from tr11ops.alerts.store import commit, read_alert_state
from tr11ops.base.observed import cause, known
from tr11ops.rundir.fallback import fallback_of

PERSON_SECONDS = 15.0  # while someone waits at the prompt


def change_alerts(
    sender: Sender, typed: Iterable[str], wanted: AlertChange, who: str, why: str
) -> tuple[tuple[Alert, ...], tuple[str, ...]]:
    """Do what a person asks for of the alerts that were `typed` (the beginning of a fingerprint is
    enough), all of it or nothing; returns the alerts after it, and notes. The journal has `who`
    typed it, and `why`.

    Those who were told hear that an alert is closed, and who is given one that it is theirs. Raises
    NoSuchAlert, OSError as the file system does, and ValueError when the alert state was written by
    a newer tr11.
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

    def carry_out(
        here: Sender,
        known_there: AlertState = AlertState(),  # noqa: B008  frozen
    ) -> tuple[tuple[Alert, ...], tuple[str, ...]]:
        stored, (names, messages) = commit(
            here.directory, lambda alert_state: change(merged(known_there, alert_state))
        )
        notes = here.carry_out(stored, messages, PERSON_SECONDS)
        alerts = (stored.alert_state.find(name) for name in names)
        return tuple(alert for alert in alerts if alert is not None), tuple(notes)

    trouble: OSError | None = None
    if kept_here(sender.directory) is None:
        try:
            return carry_out(sender)
        except OSError as error:
            trouble = error
    with fallback_of(sender.directory) as local:
        home = read_alert_state(sender.directory).alert_state
        alerts, notes = carry_out(
            replace(sender, directory=local), replace(home, messages=(), events=())
        )
        if trouble is None:
            lack = ""
        else:
            lack = f" ({cause(trouble)})"
        kept = f"the run directory cannot be written{lack}: this is kept in {local.root}, until the watchdog can"
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
        message = AlertMails(policy, now).message((part,), part.to)
        messages.append(message)
        alert_state = alert_state.with_alert(told(part, (message,), now))
    return replace(alert_state, messages=(*alert_state.messages, *messages)), tuple(messages)


def send_test(sender: Sender, to: tuple[str, ...]) -> tuple[tuple[str, str, str], ...]:
    """Send a test message on every route, at once; (route, to whom, trouble or "") of each."""
    mail, urls = sender.routes()
    results: list[tuple[str, str, str]] = []
    message = trial_message(to or sender.policy.everyone, sender.policy, sender.now)
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
    sender: Sender, situation: RunSituation, again: bool = False
) -> tuple[Message | None, tuple[str, ...]]:
    """Send the daily summary that is due; with `again` also one that went out already.

    Returns it, or None when it went out before, and notes. Raises OSError and ValueError as
    `change_alerts`.
    """
    policy = sender.policy
    now = sender.now
    left = known(waiting(sender.directory), None)

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

    stored, message = commit(sender.directory, change)
    if message is None:
        return None, ()
    return message, tuple(sender.carry_out(stored, (message,), PERSON_SECONDS))


def read_digest(sender: Sender, situation: RunSituation) -> tuple[str, tuple[str, ...]]:
    """Subject and lines of the summary as it is now. Raises OSError and ValueError as
    `read_alert_state` does.
    """
    return digest(
        current_alert_state(sender.directory),
        sender.policy,
        now=sender.now,
        backlog=known(waiting(sender.directory), None),
        situation=situation,
    )

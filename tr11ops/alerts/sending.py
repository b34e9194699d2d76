"""Carries out what the alert state has decided: queues its messages, writes its journal entries,
talks to the servers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tr11ops.alerts.incidents import SENT, WATCHDOG
from tr11ops.alerts.mail_route import MailRoute
from tr11ops.alerts.outbox import DeliveryReport, OutboxEntry, Route, deliver, queue
from tr11ops.alerts.policy import Policy, policy_of
from tr11ops.alerts.state import AlertState, Message, event_of
from tr11ops.alerts.store import StoredAlerts, commit
from tr11ops.alerts.url_route import UrlRoute
from tr11ops.base.observed import cause
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import host_name
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

LEFT_BEHIND_SECONDS = 120.0  # what a process decided and did not carry out by then, it never will


def policy_for(directory: RunDirectory, card: RunCard, typed: str = "") -> Policy:
    """The card's rules for messages of this run from this machine."""
    return policy_of(
        card, mark=directory.mark, host=host_name(), folder=str(Path.cwd()), typed=typed
    )


def about(alert_state: AlertState, message: Message) -> dict[str, Any]:
    """What the journal keeps of a message: never its text."""
    alert = None
    if message.alert:
        alert = alert_state.find(message.alert)
    data: dict[str, Any] = {"message": message.id, "kind": message.kind, "to": list(message.to)}
    if len(message.alerts) > 1:
        data["alerts"] = list(message.alerts)
    if alert is None:
        return data
    return {**event_of(alert, SENT, who=WATCHDOG, why="", now=message.time).data, **data}


# ----------------------------------------------------------------------------- outbox and journal
def flush(
    directory: RunDirectory,
    stored: StoredAlerts,
    mine: tuple[Message, ...],
    policy: Policy,
    now: float,
) -> list[str]:
    """Carry out what the alert state has decided: queue its messages, write its journal entries,
    and strike both off.

    Only what this process decided (`mine`, and events of `now`), and what a killed one left behind.
    Returns troubles.
    """
    ours = {message.id for message in mine}
    notes: list[str] = []
    queued, written = set(), set()
    for message in stored.alert_state.messages:
        if message.id in ours or _is_left_behind(message.time, now):
            try:
                queue(directory, message, routes_of(message, policy))
                queued.add(message.id)
            except OSError as error:
                notes.append(f"outbox: {cause(error)}")
    journal = Journal(directory.journal)
    for event in stored.alert_state.events:
        if event.time == now or _is_left_behind(event.time, now):
            try:
                journal.write(
                    event.kind, event.why, {**event.data, "event": event.id}, event.who, event.time
                )
                written.add(event.id)
            except OSError as error:
                notes.append(f"the journal could not be written: {cause(error)}")
                break
    if queued or written:
        try:
            commit(directory, lambda alert_state: (_struck(alert_state, queued, written), None))
        except (OSError, ValueError) as error:
            notes.append(f"the alert state cannot be kept: {cause(error)}")
    return notes


def _is_left_behind(time: float, now: float) -> bool:
    return abs(now - time) > LEFT_BEHIND_SECONDS


def _struck(alert_state: AlertState, queued: set[str], written: set[str]) -> AlertState:
    return replace(
        alert_state,
        messages=tuple(message for message in alert_state.messages if message.id not in queued),
        events=tuple(event for event in alert_state.events if event.id not in written),
    )


def routes_of(message: Message, policy: Policy) -> tuple[str, ...]:
    return (
        *(("mail",) if message.to else ()),
        *(("urls",) if policy.has_urls and message.urls else ()),
    )


# ----------------------------------------------------------------------------- sending
class ClosedRoute(Record):
    """Where the card names no delivery URLs any more, messages for them are given up."""

    name: str = "urls"

    def send(self, entry: OutboxEntry) -> DeliveryReport:
        return DeliveryReport(is_over=True, trouble="")


def routes(card: RunCard, policy: Policy, now: Callable[[], float]) -> tuple[Route, ...]:
    """The ways to people that the card names."""
    rules = card.alerts
    local = policy.host if policy.host.isascii() else "localhost"
    sender = rules.sender or f"tr11@{local}"
    known, most = policy.addresses, rules.delivery_seconds
    mail: Route = MailRoute(
        rules.smtp_host,
        rules.smtp_port,
        sender=sender,
        local=local,
        clock=now,
        known=known,
        deadline=most,
    )
    urls: Route
    if rules.urls_file is None:
        urls = ClosedRoute()
    else:
        urls = UrlRoute(Path(rules.urls_file), deadline=most)
    return mail, urls


def send_waiting(
    directory: RunDirectory,
    card: RunCard,
    policy: Policy,
    alert_state: AlertState,
    now: float,
    seconds: float,
    only: frozenset[str] | None = None,
    proven: frozenset[str] = frozenset(),
) -> tuple[int, list[str]]:
    """Send the queued messages; returns how many deliveries were done, and the troubles. `proven`:
    see `deliver`.
    """
    try:
        done = deliver(
            directory,
            routes(card, policy, lambda: now),
            now=lambda: now,
            seconds=seconds,
            only=only,
            proven=proven,
        )
    except OSError as error:
        return 0, [f"outbox: {cause(error)}"]
    notes = list(done.troubles)
    journal = Journal(directory.journal)
    for entry in done.sent:
        data = {
            **about(alert_state, entry.message),
            "route": entry.route,
            "to": list(entry.done),
            "left_out": list(entry.left),
        }
        if not entry.done and not entry.left:
            continue
        try:
            journal.write(
                SENT, entry.message.subject, {**data, "event": f"{entry.name}-sent"}, WATCHDOG, now
            )
        except OSError as error:
            notes.append(f"the journal could not be written: {cause(error)}")
    return len(done.sent), notes

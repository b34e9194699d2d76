"""Carries out what the alert state has decided: queues its messages, writes its journal entries,
talks to the servers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.alerts.answer_link import MailLinks, usual_key
from tr11ops.alerts.incidents import SENT
from tr11ops.alerts.mail_route import MailRoute
from tr11ops.alerts.outbox import deliver, queue
from tr11ops.alerts.policy import Policy, policy_of
from tr11ops.alerts.state import WATCHDOG, AlertEvent, AlertState, Message, event_of
from tr11ops.alerts.store import StoredAlerts, commit
from tr11ops.alerts.url_route import UrlRoute
from tr11ops.base.observed import cause
from tr11ops.runcard.card import RunCard, shipped_folder
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import host_name
from trainer.contract.record import Record

LEFT_BEHIND_SECONDS = 120.0  # what a process decided and did not carry out by then, it never will


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
    return {**event_of(alert, SENT, why="", now=message.time).data, **data}


def _is_left_behind(time: float, now: float) -> bool:
    return abs(now - time) > LEFT_BEHIND_SECONDS


def _struck(alert_state: AlertState, queued: set[str], written: set[str]) -> AlertState:
    return replace(
        alert_state,
        messages=tuple(message for message in alert_state.messages if message.id not in queued),
        events=tuple(event for event in alert_state.events if event.id not in written),
    )


class Sender(Record):
    """What one process tells people of a run at one moment: by the card's rules, from a directory's alert state.

    `directory` is where that, the messages and the journal are; `policy` says who hears what.
    """

    directory: RunDirectory
    card: RunCard
    policy: Policy
    now: float

    @classmethod
    def of(cls, directory: RunDirectory, card: RunCard, now: float, typed: str = "") -> Sender:
        """By the card's rules, from this machine; `typed` is the card as the person named it."""
        folder = str(Path.cwd())
        if _is_same_everywhere(Path(typed), directory.paths.root):
            folder = ""
        policy = policy_of(card, mark=directory.mark, host=host_name(), folder=folder, typed=typed)
        return cls(directory, card, policy, now)

    def routes_of(self, message: Message) -> tuple[str, ...]:
        routes = []
        if message.to:
            routes.append("mail")
        if message.urls and self.policy.has_urls:
            routes.append("urls")
        return tuple(routes)

    def routes(self) -> tuple[MailRoute, UrlRoute]:
        """The ways to people that the card names: mail, and delivery URLs."""
        rules = self.card.alerts
        host = self.policy.host
        local = host if host.isascii() else "localhost"
        mail = MailRoute(
            rules.smtp_host,
            rules.smtp_port,
            sender=rules.sender or f"tr11@{local}",
            local=local,
            clock=self._clock,
            known=self.policy.addresses,
            deadline=rules.delivery_seconds,
            links=self._links(),
        )
        urls = None if rules.urls_file is None else Path(rules.urls_file)
        return mail, UrlRoute(urls, deadline=rules.delivery_seconds)

    def _links(self) -> MailLinks | None:
        """The links by which mails are answered, where the card says how the server is reached."""
        url = self.card.alerts.serve_url
        if url is None:
            return None
        return MailLinks(url, self.policy.mark, usual_key(os.environ))

    def _clock(self) -> float:
        return self.now

    def flush(self, stored: StoredAlerts, mine: tuple[Message, ...]) -> list[str]:
        """Carry out what the alert state has decided: queue its messages, write its journal entries,
        and strike both off.

        Only what this process decided (`mine`, and events of now), and what a killed one left
        behind. Returns troubles.
        """
        ours = {message.id for message in mine}
        notes: list[str] = []
        queued = set()
        written = set()
        for message in stored.alert_state.messages:
            if message.id in ours or _is_left_behind(message.time, self.now):
                try:
                    queue(self.directory, message, self.routes_of(message))
                    queued.add(message.id)
                except OSError as error:
                    notes.append(f"outbox: {cause(error)}")
        for event in stored.alert_state.events:
            if event.time == self.now or _is_left_behind(event.time, self.now):
                trouble = self._record(event)
                if trouble:
                    notes.append(trouble)
                    break
                written.add(event.id)
        if queued or written:
            try:
                commit(
                    self.directory,
                    lambda alert_state: (_struck(alert_state, queued, written), None),
                )
            except (OSError, ValueError) as error:
                notes.append(f"the alert state cannot be kept: {cause(error)}")
        return notes

    def send(
        self,
        alert_state: AlertState,
        seconds: float,
        only: Iterable[Message] | None = None,
        proven: frozenset[str] = frozenset(),
    ) -> tuple[int, list[str]]:
        """Send what is queued, or `only` these messages; returns how many deliveries were done, and
        the troubles. `proven`: see `deliver`.
        """
        ids = None if only is None else frozenset(message.id for message in only)
        try:
            sent, notes = deliver(
                self.directory, self.routes(), self._clock, seconds, only=ids, proven=proven
            )
        except OSError as error:
            return 0, [f"outbox: {cause(error)}"]
        for entry in sent:
            if not entry.done and not entry.left:
                continue
            data = {
                **about(alert_state, entry.message),
                "route": entry.route,
                "to": list(entry.done),
                "left_out": list(entry.left),
            }
            event = AlertEvent(
                f"{entry.name}-sent",
                SENT,
                who=WATCHDOG,
                why=entry.message.subject,
                time=self.now,
                data=data,
            )
            trouble = self._record(event)
            if trouble:
                notes.append(trouble)
        return len(sent), notes

    def carry_out(
        self, stored: StoredAlerts, messages: tuple[Message, ...], seconds: float
    ) -> list[str]:
        """`flush` what was decided, and send these messages; returns troubles."""
        notes = self.flush(stored, messages)
        if messages:
            notes += self.send(stored.alert_state, seconds, messages)[1]
        return notes

    def _record(self, event: AlertEvent) -> str:
        """Write an entry of the journal; what went wrong, or ""."""
        data = {**event.data, "event": event.id}
        try:
            Journal(self.directory.journal).write(
                event.kind, event.why, data, event.who, event.time
            )
        except OSError as error:
            return f"the journal could not be written: {cause(error)}"
        return ""


def _is_same_everywhere(card: Path, root: Path) -> bool:
    """Whether a card, as it was typed, means the run at `root` in whatever folder a command is typed:
    not where its paths begin in the current one. By the names alone: `runcard.find.base_of` looks at
    the file system, and of one that does not answer a mail must go out.
    """
    if not card.is_absolute() or card.is_relative_to(shipped_folder()):
        return False
    return root.is_relative_to(card.parent) or not root.is_relative_to(Path.cwd())

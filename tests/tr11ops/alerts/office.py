"""A run directory, a card and a real mail server on the loopback, with a clock that the test turns."""

from __future__ import annotations

import asyncio
import email
import email.policy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP

from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.service import AlertInput, AlertOutcome, process
from tr11ops.alerts.store import read_alert_state
from tr11ops.cli.common import directory_of
from tr11ops.detect.detector import Finding, Severity
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.rundir.journal import JournalEntry, read_journal
from tr11ops.rundir.paths import RunDirectory

ANA, BEN, CLEO = "ana@example.org", "ben@example.org", "cleo@example.org"
LIST = "group@example.org"
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
CRITICAL, WARNING, INFO = Severity.CRITICAL, Severity.WARNING, Severity.INFO


def at(text: str, zone: str = "UTC") -> float:
    """A moment from a wall clock, e.g. at("2022-05-02 08:00", "Europe/Paris")."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def clock(seconds: float, zone: str = "UTC") -> str:
    return datetime.fromtimestamp(seconds, ZoneInfo(zone)).strftime("%d %H:%M")


NOON = at("2022-05-02 12:00")  # a Monday


def finding(
    detector: str = "stalled", severity: Severity = CRITICAL, subject: str = "1007", **more: Any
) -> Finding:
    """A subject that begins with a digit is a job, which is no identity; all else is a name."""
    values: dict[str, Any] = {
        "title": f"{detector} it is",
        "evidence": ("line one",),
        "fix": "tr11 logs",
        **more,
    }
    values.setdefault("identity", (subject,) if subject and not subject[0].isdigit() else ())
    return Finding(detector, severity, subject=subject, **values)


@dataclass
class Mailbox:
    """What a mail server was handed, and how it behaves: answers by address, by mail, or by
    dropping the line.
    """

    mails: list[tuple[tuple[str, ...], Any]] = field(default_factory=list)
    recipient_answers: dict[str, str] = field(default_factory=dict)
    data_answers: list[str] = field(default_factory=list)
    drop_after: bool = False
    silent: bool = False
    slow: set[str] = field(default_factory=set)  # addresses that take for ever
    connections: int = 0

    async def handle_EHLO(self, server: SMTP, session: Any, envelope: Any, hostname: str) -> str:
        self.connections += 1
        if self.silent:
            await asyncio.sleep(30)
        session.host_name = hostname
        return "250 HELP"

    async def handle_RCPT(
        self, server: SMTP, session: Any, envelope: Any, address: str, options: list[str]
    ) -> str:
        if address in self.slow:
            await asyncio.sleep(30)
        answer = self.recipient_answers.get(address, "250 OK")
        if answer.startswith("250"):
            envelope.rcpt_tos.append(address)
        return answer

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Any) -> str:
        answer = self.data_answers.pop(0) if self.data_answers else "250 OK"
        if answer.startswith("250"):
            mail = email.message_from_bytes(envelope.content, policy=email.policy.default)
            self.mails.append((tuple(envelope.rcpt_tos), mail))
        if self.drop_after:  # says yes, and is gone before the client has said goodbye
            server.transport.write(b"250 OK\r\n")  # type: ignore[union-attr]
            server.transport.close()  # type: ignore[union-attr]
        return answer

    @property
    def subjects(self) -> list[str]:
        return [str(mail["Subject"]) for _, mail in self.mails]

    def told(self) -> list[tuple[str, ...]]:
        return [to for to, _ in self.mails]


class Server(Controller):
    """aiosmtpd on a free port of the loopback."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox, hostname="127.0.0.1", port=0)

    def _trigger_server(self) -> None:
        assert self.server is not None
        self.port = self.server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        super()._trigger_server()


class Office:
    """Looks at the run at given moments, and says what mails that caused."""

    def __init__(self, folder: Path, port: int, *settings: str) -> None:
        self.folder, self.port = folder, port
        self.path = write_card(folder)
        self.set(*settings)
        self.directory: RunDirectory = directory_of(self.card)
        self.directory.root.mkdir(exist_ok=True)

    def set(self, *settings: str) -> None:
        """The card's [alerts] section, beyond server and sender."""
        fixed = (
            'smtp_host="127.0.0.1"',
            f"smtp_port={self.port}",
            'sender="bot@example.org"',
            'digest_time=""',
        )
        overrides = [f"alerts.{line}" for line in (*fixed, *settings)]
        self.card: RunCard = load_card(self.path, overrides, {}, directory=self.folder)

    def look(
        self,
        now: float,
        *findings: Finding,
        blind: Iterable[str] = (),
        observed: bool = True,
        deliver: bool = True,
    ) -> AlertOutcome:
        return process(self.sender(now), AlertInput(findings, frozenset(blind), observed), deliver)

    def sender(self, now: float) -> Sender:
        return Sender.of(self.directory, self.card, now, "tr11.toml")

    @property
    def alert_state(self) -> Any:
        return read_alert_state(self.directory).alert_state

    def journal(self, kind: str = "") -> list[JournalEntry]:
        ledger = read_journal(self.directory.journal)
        assert ledger.is_sound
        return [entry for entry in ledger.entries if entry.kind.startswith(kind)]

    def folder_of(self, name: str) -> Path:
        return self.directory.paths.state / "alerts" / name

    def files(self, name: str) -> list[str]:
        """Names below state/alerts/NAME, without the drafts of killed processes."""
        folder = self.folder_of(name)
        return sorted(path.name for path in folder.glob("[!.]*")) if folder.exists() else []


def run_days(
    office: Office,
    mailbox: Mailbox,
    begin: float,
    hours: int,
    sees: Callable[[float], Iterable[Finding]],
    zone: str,
) -> list[tuple[str, tuple[str, ...], str]]:
    """Look once an hour; (time of day, to whom, subject) of each mail."""
    log = []
    for hour in range(hours):
        now = begin + hour * HOUR
        before = len(mailbox.mails)
        outcome = office.look(now, *sees(now))
        assert outcome.notes == (), outcome.notes
        log += [(clock(now, zone), to, str(mail["Subject"])) for to, mail in mailbox.mails[before:]]
    return log

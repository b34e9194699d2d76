"""Mail over SMTP, as the original sent it: to a relay of the site, without a password.

It is sent with the standard library: a duplicate is recognised, and an incident is one thread, only
by Message-ID and In-Reply-To, and apprise writes a Message-ID of its own into every mail. (A mail
server that wants a password is a `mailtos://` line in alerts.urls_file, which apprise serves.)
"""

from __future__ import annotations

import re
import smtplib
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime

from msgspec.structs import replace

from tr11ops.alerts.answer_link import MailLinks, answerable
from tr11ops.alerts.mail_text.alert import is_alarm
from tr11ops.alerts.mail_text.shared import clean
from tr11ops.alerts.outbox import DeliveryReport, OutboxEntry
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.state import Message
from tr11ops.base.deadline import within
from tr11ops.base.observed import cause
from tr11ops.base.units import duration
from trainer.contract.record import Record

TIMEOUT_SECONDS = 10.0
DEADLINE_SECONDS = 30.0
LATE_SECONDS = 600.0
_ADDRESS = re.compile(r"[!#-'*+./0-9=?A-Z^_`a-z{|}~-]+@[A-Za-z0-9._-]+")


class MailRoute(Record):
    """One mail server. `known` are the addresses that the card names: others that it refuses are
    given up.

    `clock` tells how late a mail is. `timeout` is that of one answer, `deadline` that of a whole
    mail to all of its people, in seconds. `links`: each person gets a mail of their own, with a link
    to answer by.
    """

    host: str
    port: int
    sender: str
    local: str
    clock: Callable[[], float]
    known: Collection[str] = ()
    timeout: float = TIMEOUT_SECONDS
    deadline: float = DEADLINE_SECONDS
    links: MailLinks | None = None
    name: str = "mail"

    def send(self, entry: OutboxEntry) -> DeliveryReport:
        """Send to all who are left. Never raises for what server, network or address do."""
        to = tuple(address for address in entry.left if address not in entry.done)
        if not to:
            return DeliveryReport(is_over=True)
        if self.links is None or not answerable(entry.message):
            return self._send_to(entry.message, to, self.deadline)
        return self._send_to_each(entry.message, to, self.links)

    def _send_to_each(
        self, message: Message, to: tuple[str, ...], links: MailLinks
    ) -> DeliveryReport:
        """A mail to each person. Who was not reached is tried last in the next round, so that one who
        takes all the time keeps up no one else for ever.
        """
        began = time.monotonic()
        reports: list[DeliveryReport] = []
        untried = list(to)
        while untried:
            left = self.deadline - (time.monotonic() - began)
            if left <= 0 or any(report.is_unreachable for report in reports):
                break
            address = untried.pop(0)
            lines = links.lines(message, address, self.clock())
            mine = replace(message, to=(address,))
            reports.append(self._send_to(mine, (address,), left, lines))
        return joined_reports(reports, untried)

    def _send_to(
        self,
        message: Message,
        to: tuple[str, ...],
        deadline: float,
        links: tuple[str, ...] = (),
    ) -> DeliveryReport:
        """One mail to these people, within so many seconds."""
        wrong = [address for address in to if not is_address(address)]
        right = tuple(address for address in to if address not in wrong)
        refused: dict[str, tuple[int, str]] = dict.fromkeys(wrong, (553, "is not a mail address"))
        if right:
            line = _Line(smtplib.SMTP(timeout=self.timeout, local_hostname=self.local))
            try:
                mail = compose(message, self.sender, self.clock(), links)
                refused |= within(deadline, lambda: self._send(line, mail, right), line.cut)
            except smtplib.SMTPConnectError as error:
                return DeliveryReport(left=to, trouble=self._failure(error), is_unreachable=True)
            except smtplib.SMTPResponseException as error:
                refused |= dict.fromkeys(right, (error.smtp_code, _text(error.smtp_error)))
            except (smtplib.SMTPNotSupportedError, ValueError, MessageError) as error:
                refused |= dict.fromkeys(right, (554, cause(error)))
            except (OSError, smtplib.SMTPException) as error:
                # late on an open line may be the fault of this mail's recipients alone
                lost = not line.is_open
                return DeliveryReport(
                    left=to, trouble=self._failure(error), is_unreachable=lost, is_broken=not lost
                )
        return self._report(to, refused)

    def _send(
        self, line: _Line, mail: EmailMessage, to: tuple[str, ...]
    ) -> dict[str, tuple[int, str]]:
        """Connect and hand it over; returns who was refused. Raises OSError, SMTPException and
        ValueError.
        """
        try:
            code, text = line.server.connect(self.host, self.port)
            if code != 220:
                raise smtplib.SMTPConnectError(code, text)
            line.is_open = True
            refused = line.server.send_message(mail, from_addr=self.sender, to_addrs=list(to))
        except smtplib.SMTPRecipientsRefused as error:
            refused = {
                address: error.recipients.get(address, (450, b"was not asked")) for address in to
            }
        finally:
            # without goodbye: nothing that goes wrong once the mail was taken may count
            line.server.close()
        return {address: (code, _text(words)) for address, (code, words) in refused.items()}

    def _report(self, to: tuple[str, ...], refused: dict[str, tuple[int, str]]) -> DeliveryReport:
        gone = tuple(
            address
            for address in to
            if refused.get(address, (0,))[0] >= 500 and address not in self.known
        )
        left = tuple(address for address in to if address in refused and address not in gone)
        words = "; ".join(
            f"{address}: {self._answer(*refused[address])}" for address in (*left, *gone)
        )
        return DeliveryReport(
            done=tuple(address for address in to if address not in refused),
            left=left,
            withdrawn=gone,
            trouble=clean(words, 400),
            is_refused=bool(left) and all(refused[address][0] >= 500 for address in left),
            is_over=not left,
        )

    def _failure(self, error: Exception) -> str:
        return clean(f"{self.host}:{self.port}: {cause(error)}", 200)

    def _answer(self, code: int, words: bytes | str) -> str:
        return clean(f"the server said {code} {_text(words)}", 200)


@dataclass
class _Line:
    """A connection, and whether the server has greeted us on it."""

    server: smtplib.SMTP
    is_open: bool = False

    def cut(self) -> None:
        """End it from outside: the one who reads from it is told that it is over."""
        if self.server.sock is not None:
            with suppress(OSError):
                self.server.sock.shutdown(socket.SHUT_RDWR)


def joined_reports(reports: Sequence[DeliveryReport], untried: Sequence[str]) -> DeliveryReport:
    """What came of several mails of one message."""
    left = [address for report in reports for address in report.left]
    troubles = dict.fromkeys(report.trouble for report in reports if report.trouble)
    return DeliveryReport(
        done=tuple(address for report in reports for address in report.done),
        left=(*untried, *left),
        withdrawn=tuple(address for report in reports for address in report.withdrawn),
        trouble=clean("; ".join(troubles), 400),
        is_refused=bool(left) and not untried and all(r.is_refused for r in reports if r.left),
        is_unreachable=any(report.is_unreachable for report in reports),
        is_broken=any(report.is_broken for report in reports),
        is_over=not (untried or left),
    )


def compose(message: Message, sender: str, now: float, links: Sequence[str] = ()) -> EmailMessage:
    """The mail of a message. Its date is when it was written; one that comes late says so. `links`
    are lines that follow on what it says first.

    Raises ValueError where a header could not be one.
    """
    mail = EmailMessage(policy=SMTP)
    mail["From"] = Address(addr_spec=sender)
    mail["To"] = tuple(Address(addr_spec=address) for address in message.to if is_address(address))
    mail["Subject"] = " ".join(message.subject.split())
    mail["Date"] = format_datetime(datetime.fromtimestamp(message.time, UTC))
    mail["Message-ID"] = message.message_id
    if message.thread:
        mail["In-Reply-To"] = message.thread
        mail["References"] = message.thread
    mail["Auto-Submitted"] = "auto-generated"  # no holiday notes in answer
    if is_alarm(message):
        mail["Importance"] = "high"
    late = now - message.time
    note = ""
    if late > LATE_SECONDS:
        note = f"(This waited {duration(late)} for the mail server.)\n\n"
    appendix = ""
    if message.appendix:
        appendix = f"\n{message.appendix}\n"
    text = message.body
    if links:
        rest = text[message.opening :].lstrip("\n")
        text = "\n".join((text[: message.opening], "", *links, "", rest))
    body = (note + text + appendix).encode("utf-8", "replace").decode("utf-8")
    mail.set_content(body, cte="7bit" if _is_simple(body) else "quoted-printable")
    return mail


def _is_simple(body: str) -> bool:
    return body.isascii() and all(len(line) <= 900 for line in body.split("\n"))


def mailed(policy: Policy, name: str) -> str:
    """The mail address that a person's name stands for, or the name where the card mails no one; ""
    where no mail reaches it.
    """
    address = policy.address_of(name)
    if policy.everyone and not is_address(address):
        return ""
    return address


def is_address(text: str) -> bool:
    """Whether a text can stand in a mail's header as one address."""
    if not text.isascii() or not _ADDRESS.fullmatch(text):
        return False
    try:
        Address(addr_spec=text)
    except (ValueError, IndexError, MessageError):
        return False
    return True


def _text(words: bytes | str) -> str:
    if isinstance(words, bytes):
        return words.decode("utf-8", "replace")
    return words

"""Reads the replies to a run's mails from an IMAP mailbox. Read-only: many runs and people may
share the mailbox.

The server is asked only for mails that name this run's Message-IDs. What was read is remembered by
its number in the mailbox (UID) in the alert state, so nothing in the mailbox is marked or moved.
"""

from __future__ import annotations

import imaplib
import re
import socket
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tr11ops.alerts.secret_file import secret_lines
from tr11ops.base.deadline import within
from tr11ops.base.errors import MailboxError, PrivateFileError
from tr11ops.base.redact import one_line
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

LARGEST_BYTES = 64 << 10  # of a mail: the word that counts is at its beginning
MOST_AT_ONCE = 100
DAYS_BACK = 3  # where nothing was read before
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_UID = re.compile(rb"\bUID (\d+)")
# what the library raises: its own, and whatever an answer that it did not expect makes of its code
_ODDITIES = (OSError, ValueError, LookupError, AttributeError, TypeError, imaplib.IMAP4.error)


class Inbox(Record):
    """What a reading found: mails as bytes, oldest first, and up to where the mailbox was read
    (UIDVALIDITY, UID).
    """

    mails: tuple[bytes, ...] = ()
    seen: tuple[int, int] | None = None


class Mailbox(Record):
    """One mailbox. `credentials` is a private file with two lines, user and password. Times in
    seconds.
    """

    host: str
    port: int
    credentials: Path
    folder: str = "INBOX"
    tls: bool = True
    deadline: float = 30.0

    def read(self, domain: str, seen: tuple[int, int] | None, now: float) -> Inbox:
        """The mails that answer messages of `domain` and came after `seen`. Raises MailboxError."""
        place, secrets = f"mailbox {self.host}:{self.port}", tuple[str, ...]()
        lines: list[imaplib.IMAP4] = []

        def cut() -> None:
            for line in lines:
                with suppress(OSError):
                    line.sock.shutdown(socket.SHUT_RDWR)

        try:
            secrets = secret_lines(self.credentials)
            if len(secrets) != 2:
                raise MailboxError(f"{self.credentials}: must hold two lines, user and password")
            user, password = secrets
            return within(
                self.deadline, lambda: self._read(user, password, domain, seen, now, lines), cut
            )
        except MailboxError:
            raise
        except PrivateFileError as error:
            raise MailboxError(str(error)) from None
        except _ODDITIES as error:
            if isinstance(error, OSError) and error.strerror:
                text = error.strerror
            else:
                text = str(error)
            raise MailboxError(
                f"{place}: {one_line(text, secrets) or type(error).__name__}"
            ) from None

    def _read(
        self,
        user: str,
        password: str,
        domain: str,
        seen: tuple[int, int] | None,
        now: float,
        lines: list[imaplib.IMAP4],
    ) -> Inbox:
        line = self._connect()
        lines.append(line)
        try:
            line.login(_quoted(user), password)
            _answer(line.select(_quoted(self.folder), readonly=True))
            validity = int(_last(line.response("UIDVALIDITY")[1]))
            last = 0
            if seen is not None and seen[0] == validity:
                last = seen[1]
            told = (
                f'OR HEADER "In-Reply-To" {_quoted(domain)} HEADER "References" {_quoted(domain)}'
            )
            found = _answer(
                line.uid("SEARCH", f"UID {last + 1}:*" if last else f"SINCE {_day(now)}", told)
            )
            # None where the server says nothing of what it found
            words = ((found and found[0]) or b"").split()
            # `n:*` names the last mail of all where there is none from n on
            numbers = sorted(number for word in words if (number := int(word)) > last)[
                :MOST_AT_ONCE
            ]
            mails = [mail for number in numbers if (mail := _fetched(line, number)) is not None]
            return Inbox(tuple(mails), (validity, numbers[-1] if numbers else last))
        finally:
            with suppress(*_ODDITIES):
                line.logout()

    def _connect(self) -> imaplib.IMAP4:
        if not self.tls:
            return imaplib.IMAP4(self.host, self.port, timeout=self.deadline)
        import ssl

        context = ssl.create_default_context()
        return imaplib.IMAP4_SSL(self.host, self.port, ssl_context=context, timeout=self.deadline)


def mailbox_of(card: RunCard) -> Mailbox | None:
    """The mailbox that the card names; None where it names none."""
    rules = card.alerts
    if rules.imap_host is None or rules.imap_credentials_file is None:
        return None
    secret = Path(rules.imap_credentials_file)
    return Mailbox(
        rules.imap_host,
        rules.imap_port,
        secret,
        rules.imap_folder,
        rules.imap_tls,
        rules.delivery_seconds,
    )


def _fetched(line: imaplib.IMAP4, number: int) -> bytes | None:
    """The beginning of one mail; None where someone has just removed it."""
    for part in _answer(line.uid("FETCH", str(number), f"(UID BODY.PEEK[]<0.{LARGEST_BYTES}>)")):
        if (
            isinstance(part, tuple)
            and (match := _UID.search(part[0])) is not None
            and int(match[1]) == number
        ):
            return bytes(part[1])
    return None


def _answer(answer: tuple[str, list[Any]]) -> list[Any]:
    """The data of an answer. Raises imaplib.IMAP4.error where the server said no."""
    if answer[0] != "OK":
        if answer[1]:
            words = answer[1][0]
        else:
            words = b""
        raise imaplib.IMAP4.error(
            words.decode("utf-8", "replace") if isinstance(words, bytes) else "was refused"
        )
    return answer[1]


def _last(values: list[bytes | None]) -> bytes:
    if not values or values[-1] is None:
        raise ValueError("the server did not say how it numbers mails")
    return values[-1]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _day(now: float) -> str:
    day = datetime.fromtimestamp(now, UTC) - timedelta(days=DAYS_BACK)
    return f"{day.day:02d}-{_MONTHS[day.month - 1]}-{day.year}"

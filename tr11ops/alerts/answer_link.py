"""Links in mails by which one person answers alerts of one run, without a shell: signed with a key
that the watchdog and `tr11 serve` of one user share, and good for two days.

    TOKEN = base64url(run | told | until | fingerprints | who) . base64url(HMAC-SHA-256 of it)

A link lies in no file of ours: it is made when the mail is sent.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from pathlib import Path

from tr11ops.alerts.state import OVER, Message
from tr11ops.base.errors import PrivateFileError
from tr11ops.base.observed import cause
from tr11ops.base.private_file import private_text, settings_folder
from trainer.contract.files import link_unless_taken, write_beside
from trainer.contract.record import Record

LINK_SECONDS = 2 * 86_400.0
MOST_ALERTS = 20  # of one mail; the others are acknowledged on the run's page
LONGEST_TOKEN = 4096  # characters
SHORTEST_KEY = 32
_PURPOSE = b"tr11 answer link 1\0"


class AnswerLink(Record):
    """What one link allows: that `who` answers these `alerts` (fingerprints) of the run whose
    directory has this mark (`RunDirectory.mark`), before `until`.

    `told` is when the mail was written: an incident that began later is another one. Times are
    seconds since the epoch.
    """

    run: str
    told: float
    until: float
    alerts: tuple[str, ...]
    who: str

    def token(self, key: bytes) -> str:
        """The link's text, signed."""
        fields = (
            self.run,
            repr(self.told),
            f"{self.until:.0f}",
            ",".join(self.alerts),
            self.who,
        )
        body = "|".join(fields).encode("utf-8", "replace")
        return f"{_text(body)}.{_text(_signature(key, body))}"


def opened(token: str, key: bytes) -> AnswerLink | None:
    """What a token allows, also one that has expired; None for one that this key has not signed."""
    if len(token) > LONGEST_TOKEN or not token.isascii():
        return None
    head, _, tail = token.partition(".")
    try:
        body, signature = _bytes(head), _bytes(tail)
    except ValueError:
        return None
    if not hmac.compare_digest(signature, _signature(key, body)):
        return None
    run, told, until, alerts, who = body.decode("utf-8").split("|", 4)
    return AnswerLink(
        run=run, told=float(told), until=float(until), alerts=tuple(alerts.split(",")), who=who
    )


def _signature(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + body, hashlib.sha256)


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode("ascii")


def _bytes(text: str) -> bytes:
    """Raises ValueError for what is not exactly what `_text` writes."""
    content = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _text(content) != text:
        raise ValueError("not canonical")
    return content


# ----------------------------------------------------------------------------- the key
def usual_key(environment: Mapping[str, str]) -> Path:
    """Where the key is kept: a file of this user alone, beside the tokens of `tr11 serve`."""
    return settings_folder(environment) / "answer-links.key"


def signing_key(place: Path) -> bytes:
    """The key in a file; it is made where there is none. Raises PrivateFileError where others can
    read it, it is no key, or none can be made.
    """
    if not place.exists():
        try:
            _make(place)
        except OSError as error:
            raise PrivateFileError(f"{place}: {cause(error)}") from None
    text = private_text(place).strip()
    if len(text) < SHORTEST_KEY:
        raise PrivateFileError(f"{place}: is no key; remove it, and a new one is made")
    return text.encode("utf-8")


def _make(place: Path) -> None:
    """Write a new key, unless someone else has in the same moment: the first one counts."""
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = write_beside(place, f"{secrets.token_hex(32)}\n", 0o600)
    try:
        link_unless_taken(draft, place)
    finally:
        draft.unlink(missing_ok=True)


# ----------------------------------------------------------------------------- in a mail
class MailLinks(Record):
    """The links of one run's mails: to the server at `url`, for the run of this mark, signed with the
    key in a file.
    """

    url: str
    run: str
    key: Path

    def lines(self, message: Message, address: str, now: float) -> tuple[str, ...]:
        """What a mail to one person says of the link; nothing where nothing is to be answered. A key
        that cannot be used is said there: the mail goes out all the same.
        """
        alerts = answerable(message)
        if not alerts:
            return ()
        try:
            key = signing_key(self.key)
        except PrivateFileError as error:
            return (f"(There is no link to answer by: {error.sentence})",)
        link = AnswerLink(
            run=self.run,
            told=message.time,
            until=now + LINK_SECONDS,
            alerts=alerts,
            who=address,
        )
        what = "Acknowledge, snooze or take the shift, without a shell"
        return (
            f"{what} (for {address} alone, 2 days):",
            f"  {self.url.rstrip('/')}/answer/{link.token(key)}",
        )


def answerable(message: Message) -> tuple[str, ...]:
    """The fingerprints of a message's alerts that are not over."""
    told = zip(message.alerts, message.kinds, strict=False)
    return tuple(name for name, kind in told if kind not in OVER)[:MOST_ALERTS]

"""What people reply by mail: the first word of a reply acknowledges or puts off the alerts of that
mail. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from email.utils import parseaddr

from msgspec.structs import replace

from tr11ops.alerts.changes import Change, acknowledge, apply, seconds_of, snooze
from tr11ops.alerts.mail_text.shared import clean
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.state import Alert, AlertState
from trainer.contract.record import Record

DEFAULT_SNOOZE = "2h"
MOST_ANSWERED = 500  # Message-IDs of replies that were heeded
_IDENTITY = re.compile(r"<[^<>\s]+>")
_TAG = re.compile(r"<[^>]*>")
_BREAK = re.compile(r"(?i)<(?:br|/p|/div)[^>]*>")


class MailReply(Record):
    """One reply. `answers` are the Message-IDs that it names, the one that it answers first; `line`
    is its first.
    """

    identity: str
    sender: str
    answers: tuple[str, ...]
    line: str
    is_automatic: bool = False


def parse_reply(content: bytes) -> MailReply:
    """What a mail says; a part of it that makes no sense is left empty."""
    mail = message_from_bytes(content, policy=default)
    assert isinstance(mail, EmailMessage)
    answered, thread = (
        _IDENTITY.findall(_header(mail, name)) for name in ("In-Reply-To", "References")
    )
    return MailReply(
        identity=_header(mail, "Message-ID").strip(),
        sender=parseaddr(_header(mail, "From"))[1].lower(),
        answers=tuple(dict.fromkeys([*answered, *reversed(thread)])),
        line=_first_line(mail),
        is_automatic=_header(mail, "Auto-Submitted").strip().lower() not in {"", "no"},
    )


def _header(mail: EmailMessage, name: str) -> str:
    try:
        return " ".join(str(mail.get(name, "")).split())
    except (
        ValueError,
        IndexError,
        AttributeError,
        TypeError,
        LookupError,
    ):  # as the library's parser does on garbage
        return ""


def _first_line(mail: EmailMessage) -> str:
    """The first line that the person wrote: not blank, not quoted."""
    try:
        part = mail.get_body(("plain", "html"))
        if part is None:
            text = ""
        else:
            text = str(part.get_content())
    except (ValueError, KeyError, LookupError, AttributeError, TypeError):
        return ""
    if part is not None and part.get_content_subtype() == "html":
        text = _TAG.sub("", _BREAK.sub("\n", text))
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line and not line.startswith(">")), "")


def apply_mails(
    alert_state: AlertState, mails: Iterable[bytes], policy: Policy, now: float
) -> tuple[AlertState, tuple[str, ...]]:
    """The alert state after all replies, and one line for each that was not heeded. Each reply
    counts once.
    """
    notes: list[str] = []
    for content in mails:
        try:
            reply = parse_reply(content)
        except Exception as error:  # the library's parser raises anything on garbage, and anyone may write to a mailbox
            notes.append(f"a reply cannot be read: {type(error).__name__}")
            continue
        if reply.is_automatic or reply.identity in alert_state.answered:
            continue
        alerts = _meant(alert_state, reply, policy)
        if not alerts:
            continue
        shown = clean(reply.sender, 60)
        try:
            if reply.sender not in _people(alerts, policy):
                raise ValueError("is none of the people of this run")
            change, kind, why = _asked(reply)
            for alert in alerts:
                alert_state = apply(
                    alert_state,
                    alert.fingerprint,
                    change,
                    kind,
                    reply.sender,
                    why or "reply by mail",
                    now,
                )
        except ValueError as error:
            notes.append(f"reply of {shown}: {clean(str(error), 120)}")
        if reply.identity:
            alert_state = replace(
                alert_state, answered=(*alert_state.answered, reply.identity)[-MOST_ANSWERED:]
            )
    return alert_state, tuple(notes)


def _meant(alert_state: AlertState, reply: MailReply, policy: Policy) -> tuple[Alert, ...]:
    """The open alerts of the message that a reply answers; where that names none, of the thread
    that it is in.
    """
    for identity in reply.answers:
        if not identity.endswith(f"@{policy.domain}>"):
            continue
        found = tuple(
            alert
            for alert in alert_state.open_alerts
            if identity in (*alert.mails, *alert.thread.split())
        )
        if found:
            return found
    return ()


def _people(alerts: Iterable[Alert], policy: Policy) -> frozenset[str]:
    told = (address for alert in alerts for address in (*alert.told, alert.owner))
    return frozenset(address.lower() for address in (*policy.everyone, *told) if address)


def _asked(reply: MailReply) -> tuple[Change, str, str]:
    """Raises ValueError where the first word asks for nothing that can be done."""
    word, _, rest = reply.line.partition(" ")
    action = word.strip(".,:;!").lower()
    if action == "ack":
        change, kind = acknowledge(reply.sender, rest)
        return change, kind, rest.strip()
    if action == "snooze":
        span, _, why = rest.strip().partition(" ")
        change, kind = snooze(reply.sender, seconds_of(span.strip(".,:;!") or DEFAULT_SNOOZE))
        return change, kind, why.strip()
    raise ValueError(f"begins with {clean(word, 20)!r}, neither ack nor snooze 2h")

"""What messages say. Plain text that reads the same in a mail, a chat and a log, and carries no secret."""

from __future__ import annotations

import hashlib
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from tr11ops.alerts.book import Alert, Book, Message, stamp
from tr11ops.alerts.policy import Policy
from tr11ops.detect.finding import Severity
from tr11ops.shipped import shipped
from tr11ops.units import duration

WIDTH = 78
LONGEST_SUBJECT = 160
_PASSWORD_IN_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s@]+@")
_NAMED_SECRET = re.compile(r"(?i)\b(\w*(?:token|passwd|password|secret|api_?key))(\s*=\s*|\s*:\s+)\S+")


@dataclass(frozen=True)
class Backlog:
    """Messages that wait to be sent: how many, and when the oldest of them was written."""

    count: int
    since: float | None


def clean(text: str, most: int) -> str:
    """One line of at most `most` characters, without control characters and without what looks like a secret."""
    line = "".join(character if character.isprintable() else " " for character in text[: 4 * most]).strip()
    line = _NAMED_SECRET.sub(r"\1\2***", _PASSWORD_IN_URL.sub(r"\1***@", line))
    return line if len(line) <= most else line[: most - 4].rstrip() + " ..."


def moment(seconds: float, policy: Policy) -> str:
    """A point of time as people read it, with the zone."""
    return datetime.fromtimestamp(seconds, policy.zone).strftime("%Y-%m-%d %H:%M %Z")


# ----------------------------------------------------------------------------- one alert
def alert_message(alert: Alert, kind: str, to: tuple[str, ...], policy: Policy, now: float, note: str = "") -> Message:
    """The message of one kind about an alert. The same alert and send number give the same id, whoever makes it."""
    name = f"{alert.fingerprint}-{stamp(alert.began)}-{alert.sends + 1}"
    return Message(
        id=name,
        kind=kind,
        alert=alert.fingerprint,
        detector=alert.detector,
        severity=alert.severity,
        subject=_subject(alert, kind, policy),
        body="\n".join(_body(alert, kind, to, policy, now, note)) + "\n",
        to=to,
        time=now,
        message_id=f"<{name}@{policy.mark}.tr11.invalid>",
        thread=alert.thread,
    )


def _subject(alert: Alert, kind: str, policy: Policy) -> str:
    if kind == "cleared":
        return clean(f"[OK] {policy.run}: over: {alert.title}", LONGEST_SUBJECT)
    if alert.detector == "down":  # as people's filters have known it since the first watchdog
        return clean(f"[ALERT] {policy.run} is neither running nor scheduled to run", LONGEST_SUBJECT)
    return clean(f"[{alert.severity.name}] {policy.run}: {alert.title}", LONGEST_SUBJECT)


def _body(alert: Alert, kind: str, to: tuple[str, ...], policy: Policy, now: float, note: str) -> Iterator[str]:
    yield from _opening_lines(alert, kind, policy, now)
    if note:
        yield from _wrapped(note)
    yield ""
    lasted = (alert.resolved_at if kind == "cleared" and alert.resolved_at is not None else now) - alert.began
    yield f"What:   {alert.severity.name}: {alert.title}"
    yield f"Since:  {moment(alert.began, policy)} ({duration(lasted)})"
    if kind != "cleared":
        yield f"Seen:   {moment(alert.last_seen, policy)}"
    yield from _place(policy)
    if alert.evidence:
        yield ""
        yield "Evidence:" if kind != "cleared" else "It was:"
        for line in alert.evidence:
            yield from _wrapped(line, "  ")
    if kind != "cleared":
        yield from _what_to_do(alert, policy)
    yield ""
    others = [address for address in alert.told if address not in to]
    yield from _wrapped(f"This goes to: {', '.join(to) or 'the delivery URLs'}.")
    if others:
        yield from _wrapped(f"Told before: {', '.join(others)}.")
    if alert.owner:
        yield f"Assigned to: {alert.owner}."


def _opening_lines(alert: Alert, kind: str, policy: Policy, now: float) -> Iterator[str]:
    if kind == "cleared":
        by = "" if alert.resolved_by in {"", "tr11"} else f"{alert.resolved_by}: "
        yield from _wrapped(f"This is over ({by}{alert.resolved_why}).")
        return
    if alert.detector == "down":
        yield f"***ALERT: {policy.run} is neither RUNNING nor SCHEDULED! Alert someone at Eng WG***"
        yield ""
        yield from _wrapped("Please reply to this mail once it is handled; ask in the engineering chat if unsure.")
        yield ""
    said = {
        "raised": "This has become worse.",
        "reopened": "This has come back.",
        "escalated": f"Nobody has acknowledged this for {duration(now - (alert.alarmed or alert.began))}.",
        "repeated": "This still stands, and nobody has acknowledged it.",
        "again": "This still stands: its acknowledgement or its snooze is over.",
        "assigned": f"This is now yours ({alert.owner}).",
    }
    yield from _wrapped(said.get(kind, "Something needs a person."))


def _place(policy: Policy) -> Iterator[str]:
    yield f"Run:    {policy.run}, {policy.directory}"
    yield f"Where:  host {policy.host}" + (f", in {policy.folder}" if policy.folder else "")


def _what_to_do(alert: Alert, policy: Policy) -> Iterator[str]:
    yield ""
    if alert.fix:
        yield "Type:"
        yield from _enter(policy)
        yield f"  {alert.fix}"
    yield "What to do, step by step:"
    yield f"  {runbook_place(alert.runbook)}"
    yield "To take it on, so that nobody else is called:"
    yield from _enter(policy)
    yield f"  {command(f'ack {alert.fingerprint}', policy)}"


def _enter(policy: Policy) -> Iterator[str]:
    """A card that is named by a relative path or ships with tr11 means the run only in the folder of its commands."""
    if policy.folder:
        yield f"  cd {shlex.quote(policy.folder)}"


def runbook_place(page: str) -> str:
    """Where the page of an alert lies on this machine; its name alone where it is not installed."""
    try:
        return str(shipped("runbooks", page))
    except FileNotFoundError:
        return f"runbooks/{page}"


def command(words: str, policy: Policy) -> str:
    """A `tr11 alerts` command for this run."""
    card = f" --run {shlex.quote(policy.typed)}" if policy.typed else ""
    return f"tr11 alerts {words}{card}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent and f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


# ----------------------------------------------------------------------------- the digest, and a test
def digest_message(
    book: Book, to: tuple[str, ...], policy: Policy, now: float, due: float, backlog: Backlog | None
) -> Message:
    """The daily summary that was due at `due`."""
    name = f"digest-{stamp(due)}"
    subject, lines = digest(book, policy, now, backlog)
    return Message(
        id=name,
        kind="digest",
        alert="",
        detector="",
        severity=Severity.INFO,
        subject=subject,
        body="\n".join(lines) + "\n",
        to=to,
        time=now,
        message_id=f"<{name}@{policy.mark}.tr11.invalid>",
    )


def digest(book: Book, policy: Policy, now: float, backlog: Backlog | None) -> tuple[str, tuple[str, ...]]:
    """Subject and lines of the summary of what is open, and of what ended since the last one."""
    since = book.digested if book.digested is not None else now - 86_400.0
    open_ones = book.open_alerts
    ended = [alert for alert in book.alerts if alert.resolved_at is not None and alert.resolved_at >= since]
    count = len(open_ones)
    words = f"{count} open alert{'s' if count != 1 else ''}" if count else "nothing to report"
    return clean(f"[DIGEST] {policy.run}: {words}", LONGEST_SUBJECT), tuple(
        _digest_lines(book, open_ones, ended, policy, now, backlog)
    )


def _digest_lines(
    book: Book, open_ones: tuple[Alert, ...], ended: list[Alert], policy: Policy, now: float, backlog: Backlog | None
) -> Iterator[str]:
    yield from _place(policy)
    yield f"At:     {moment(now, policy)}"
    duty = ", ".join(policy.on_duty(now))
    if duty:
        yield from _wrapped(f"On duty: {duty}")
    yield ""
    if not open_ones:
        yield "Open: nothing."
    for alert in open_ones:
        yield from _wrapped(f"{alert.severity.name:8s} {alert.fingerprint}  {alert.title}", "")
        yield from _wrapped(f"since {moment(alert.began, policy)} ({duration(now - alert.began)}); {care(alert)}", "  ")
    if ended:
        yield ""
        yield "Over since the last digest:"
        for alert in ended:
            lasted = duration((alert.resolved_at or now) - alert.began)
            yield from _wrapped(f"{alert.severity.name:8s} {alert.title} ({lasted})", "  ")
    if book.blind:
        yield ""
        yield from _wrapped(f"Could not be judged at the last look: {', '.join(book.blind)}.")
    if backlog is not None and backlog.count and backlog.since is not None:
        yield ""
        what = "1 message waits" if backlog.count == 1 else f"{backlog.count} messages wait"
        yield from _wrapped(f"{what} to be sent, the oldest since {moment(backlog.since, policy)}.")
    yield ""
    yield "A day without this summary means that the watchdog itself stands still."
    yield from _enter(policy)
    yield f"  {command('list', policy)}"


def care(alert: Alert) -> str:
    """Who looks after an alert, in a few words."""
    parts = []
    if alert.owner:
        parts.append(f"assigned to {alert.owner}")
    if alert.is_acknowledged:
        parts.append(f"acknowledged by {alert.acknowledged_by}")
    if alert.snoozed_until is not None:
        parts.append(f"snoozed by {alert.snoozed_by}")
    return ", ".join(parts) or "nobody has it"


def trial_message(to: tuple[str, ...], policy: Policy, now: float) -> Message:
    """A message that only proves that messages arrive."""
    name = f"test-{stamp(now)}-{hashlib.sha256(repr((policy.host, to)).encode()).hexdigest()[:6]}"
    body = [
        f"This is a test of the alerts of {policy.run}. Nothing is wrong.",
        "",
        *_place(policy),
        f"Sent:   {moment(now, policy)}",
    ]
    return Message(
        id=name,
        kind="test",
        alert="",
        detector="",
        severity=Severity.INFO,
        subject=clean(f"[TEST] {policy.run}: alerts arrive here", LONGEST_SUBJECT),
        body="\n".join(body) + "\n",
        to=to,
        time=now,
        message_id=f"<{name}@{policy.mark}.tr11.invalid>",
    )

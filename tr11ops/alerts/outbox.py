"""Messages on disk: queued before they are sent, moved once a server has taken them.

    state/alerts/outbox/ID-ROUTE.json    waits, with what was tried already
    state/alerts/sent/ID-ROUTE.json      was taken
    state/alerts/claims/ID-ROUTE.N       someone sends it just now

A message is sent by anyone who links the next claim. A claim holds for a quarter of an hour by the
file server's clock, so that one of a process that was killed does not hold for ever. Only a kill
between the server's yes and the move to `sent` makes a message go out twice, under the same
Message-ID.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from tr11ops.alerts.state import Message, UndeliveredMessages
from tr11ops.alerts.store import alerts_folder, outbox_folder
from tr11ops.base.observed import cause, observing
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document, read_record
from trainer.contract.files import (
    NumberedFiles,
    json_text,
    make_shared,
    write_atomically,
    write_beside,
    write_json,
)
from trainer.contract.record import Record
from trainer.contract.state_file import read_text

SCHEMA = 1
CLAIM_SECONDS = 900.0
FIRST_DELAY = 60.0
LONGEST_DELAY = 3600.0
# where a server has refused for good: someone may repair the address
LONGEST_DELAY_REFUSED = 86_400.0
MOST_FAILURES = 3  # in one round of a route
SENT_KEPT_SECONDS = 30 * 86_400.0
_LEFTOVER_SECONDS = 3600.0
_NAME = re.compile(r"[a-z0-9-]{1,120}\.json")


class OutboxEntry(Record):
    """A message on one route ("mail" or "urls"): who has it already, how often it was tried, and
    when it is next.

    `left` are addresses that wait for it; for "urls" no one is named, because the file says who.
    `done` are those that have it (addresses, or hashes of URLs). `is_refused`: the last answer was
    no, for good.
    """

    message: Message
    route: str
    left: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    attempts: int = 0
    due: float = 0.0
    trouble: str = ""
    is_refused: bool = False

    @property
    def name(self) -> str:
        return f"{self.message.id}-{self.route}"


class DeliveryReport(Record):
    """What came of one try: who has it now, who is left, and why. `withdrawn` are left out for
    good, on purpose.
    """

    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    trouble: str = ""
    is_refused: bool = False
    is_unreachable: bool = False  # no use in trying the next message now
    is_broken: bool = False  # the connection failed in the middle
    is_over: bool = False  # no one is left


class Route(Protocol):
    """A way to people. `send` never raises, and never takes longer than its time-outs."""

    @property
    def name(self) -> str: ...

    def send(self, entry: OutboxEntry) -> DeliveryReport: ...


# ----------------------------------------------------------------------------- queue
def queue(directory: RunDirectory, message: Message, routes: tuple[str, ...]) -> None:
    """Put a message on its routes, unless it is there, or was sent, already. Raises OSError as the
    file system does.
    """
    make_shared(outbox_folder(directory))
    for route in routes:
        entry = OutboxEntry(message, route, left=message.to if route == "mail" else ())
        target = outbox_folder(directory) / f"{entry.name}.json"
        sent = _sent(directory) / target.name
        if sent.exists() or target.exists():
            continue
        draft = write_beside(target, _text(entry))
        try:
            with suppress(FileExistsError):
                target.hardlink_to(draft)
        finally:
            draft.unlink(missing_ok=True)
        if sent.exists():  # someone queued and sent it between our two looks
            target.unlink(missing_ok=True)


def take_in(directory: RunDirectory, other: RunDirectory) -> None:
    """Move another directory's messages, sent and waiting ones, into this one's outbox. Raises
    OSError.
    """
    for source, target in (
        (_sent(other), _sent(directory)),
        (outbox_folder(other), outbox_folder(directory)),
    ):
        for name in _names(source):
            make_shared(target)
            if not (_sent(directory) / name).exists():
                write_atomically(target / name, read_text(source / name))
            (source / name).unlink()
    for name in _names(_sent(directory)):
        (outbox_folder(directory) / name).unlink(missing_ok=True)


def waiting_entries(directory: RunDirectory) -> tuple[OutboxEntry, ...]:
    """The messages to be sent, the oldest first. Raises OSError or ValueError when it cannot be
    read.
    """
    entries, troubles = _waiting(directory)
    if troubles and not entries:
        raise ValueError(troubles[0])
    return entries


@observing
def waiting(directory: RunDirectory) -> UndeliveredMessages:
    """The messages still to be sent."""
    entries = waiting_entries(directory)
    trouble = next((entry.trouble for entry in entries if entry.trouble), "")
    return UndeliveredMessages(
        len(entries), min((entry.message.time for entry in entries), default=None), trouble
    )


def _waiting(directory: RunDirectory) -> tuple[tuple[OutboxEntry, ...], list[str]]:
    """The messages, the oldest first, and what is wrong with the files that are no messages."""
    found: list[OutboxEntry] = []
    troubles: list[str] = []
    for name in _names(outbox_folder(directory)):
        try:
            entry = _read(outbox_folder(directory) / name)
        except (OSError, ValueError) as error:
            troubles.append(f"outbox {name}: {cause(error)}")
            continue
        if entry is not None:
            found.append(entry)
    return tuple(
        sorted(found, key=lambda entry: (entry.message.time, len(entry.name), entry.name))
    ), troubles


# ----------------------------------------------------------------------------- send
def deliver(
    directory: RunDirectory,
    routes: tuple[Route, ...],
    now: Callable[[], float],
    seconds: float,
    only: frozenset[str] | None = None,
    proven: frozenset[str] = frozenset(),
) -> tuple[list[OutboxEntry], list[str]]:
    """Send the messages, as `in_turn` has it, for at most about `seconds`; what is not sent waits
    for the next round. Returns what was sent, and the troubles.

    As soon as one message of a route is due, all are tried, so that an incident's messages arrive
    in their order. A route that cannot be reached is left for this round; so is one that fails in
    the middle of several messages. `only` limits it to messages of these ids. What failed before on
    `proven` routes (they have just taken something) is tried again at once. Raises OSError when the
    outbox cannot be read.
    """
    began = time.monotonic()
    waiting, troubles = _waiting(directory)
    sent: list[OutboxEntry] = []
    for route in routes:
        mine = [
            entry
            for entry in waiting
            if entry.route == route.name and (only is None or entry.message.id in only)
        ]
        if route.name in proven:
            mine = [replace(entry, due=0.0) for entry in mine]
        if not any(_is_due(entry, now()) for entry in mine):
            continue
        failures = 0
        for entry in in_turn(mine, now()):
            if time.monotonic() - began > seconds or failures >= MOST_FAILURES:
                break
            try:
                report = _try(directory, entry, route, now())
            except (OSError, ValueError) as error:
                troubles.append(f"outbox {entry.name}: {cause(error)}")
                continue
            if report is None:
                continue
            if report.trouble:
                troubles.append(f"{route.name}: {report.trouble}")
            if report.is_over:
                sent.append(replace(entry, done=(*entry.done, *report.done), left=report.withdrawn))
            failures += report.is_broken
            if report.is_unreachable:
                failures = MOST_FAILURES
    tidy(directory)
    return sent, list(dict.fromkeys(troubles))


def _try(
    directory: RunDirectory, entry: OutboxEntry, route: Route, now: float
) -> DeliveryReport | None:
    """Send one message, unless someone else does or has. Raises OSError or ValueError as the disk
    gives.
    """
    path = outbox_folder(directory) / f"{entry.name}.json"
    if entry.is_refused and not _is_due(entry, now):
        return None
    claims = _claims(directory, entry.name)
    claim = _claim(claims)
    if claim is None:
        return None
    try:
        current = _read(path)  # another may have sent, or tried, it between our look and our claim
        if current is None or current.attempts != entry.attempts:
            return None
        if (_sent(directory) / path.name).exists():
            path.unlink(missing_ok=True)
            return None
        make_shared(_sent(directory))  # before it is sent: what cannot be recorded must not go out
        if not claims.is_newest(claim):
            return None
        report = route.send(current)
        if report.is_over:
            path.replace(_sent(directory) / path.name)
        else:
            write_json(path, _values(_after(current, report, now)))
        return report
    finally:
        _release(claims, claim)


def in_turn(entries: Sequence[OutboxEntry], now: float) -> list[OutboxEntry]:
    """Entries (the oldest first) as they are to be tried: those due, of them alarms, of them those
    never tried before.

    So what fails slowly in every round keeps up nothing but itself. An incident's messages stay in
    their order: what comes before an urgent one of the same incident is as urgent.
    """
    from tr11ops.alerts.mail_text.alert import is_alarm

    ranks: list[tuple[bool, bool, bool]] = []
    first: dict[str, tuple[bool, bool, bool]] = {}
    for entry in reversed(entries):
        message = entry.message
        incidents = {message.alert, *message.alerts} - {""}
        own = (not _is_due(entry, now), not is_alarm(message), entry.attempts > 0)
        rank = min([own, *(first[incident] for incident in incidents if incident in first)])
        first |= dict.fromkeys(incidents, rank)
        ranks.append(rank)
    order = sorted(zip(reversed(ranks), range(len(entries)), strict=True))
    return [entries[number] for _, number in order]


def _is_due(entry: OutboxEntry, now: float) -> bool:
    return entry.due <= now or entry.due - now > 2 * LONGEST_DELAY_REFUSED


def _after(entry: OutboxEntry, report: DeliveryReport, now: float) -> OutboxEntry:
    attempts = entry.attempts + 1
    return replace(
        entry,
        left=report.left,
        done=(*entry.done, *report.done),
        attempts=attempts,
        due=now + delay(entry.name, attempts, report.is_refused),
        trouble=report.trouble,
        is_refused=report.is_refused,
    )


def delay(name: str, attempts: int, is_refused: bool) -> float:
    """Seconds until the next try: doubled each time, with a share of up to a half off that differs
    by message.

    So that a server which comes back is not met by all messages at once.
    """
    from tr11ops.base.retry import RetryPolicy

    longest = LONGEST_DELAY_REFUSED if is_refused else LONGEST_DELAY
    share = (
        int.from_bytes(hashlib.sha256(f"{name}:{attempts}".encode()).digest()[:4], "big") / 2**32
    )
    policy = RetryPolicy(
        first_seconds=FIRST_DELAY, longest_seconds=longest, chance=lambda: 1.0 - share
    )
    return policy.delay(attempts)


# ----------------------------------------------------------------------------- claims
def _claims(directory: RunDirectory, name: str) -> NumberedFiles:
    return NumberedFiles(_claim_folder(directory), f"{name}.", suffix="")


def _claim(claims: NumberedFiles) -> int | None:
    """Take the right to send a message now; None when another has it."""
    make_shared(claims.path)
    last = max(claims.numbers(), default=0)
    try:
        if last and claims.age(last) < CLAIM_SECONDS:
            return None
    except FileNotFoundError:
        return None  # given back a moment ago: its holder has just tried
    if claims.make(last + 1, secrets.token_hex(8).encode()):
        return last + 1
    return None


def _release(claims: NumberedFiles, claim: int) -> None:
    """Give a claim back, and those that ran out before it. The highest goes last, or an old one
    would count again.
    """
    for number in claims.numbers():
        if number <= claim:
            claims.file(number).unlink(missing_ok=True)


# ----------------------------------------------------------------------------- files
def _sent(directory: RunDirectory) -> Path:
    return alerts_folder(directory) / "sent"


def _claim_folder(directory: RunDirectory) -> Path:
    return alerts_folder(directory) / "claims"


def _names(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)  # noqa: PTH208  a name is enough
    except FileNotFoundError:
        return []
    return sorted(name for name in names if _NAME.fullmatch(name))


def _values(entry: OutboxEntry) -> dict[str, Any]:
    return {"schema": SCHEMA, **document(entry)}


def _text(entry: OutboxEntry) -> str:
    return json_text(_values(entry))


def _read(path: Path) -> OutboxEntry | None:
    """The entry in a file; None when it was sent meanwhile. Raises OSError, or ValueError when it
    is no message.
    """
    return read_record(OutboxEntry, path, "a message", SCHEMA)


def tidy(directory: RunDirectory) -> None:
    """Remove what was sent long ago, and what killed processes left. What cannot be removed is left
    to the next.
    """
    now = time.time()
    folders = (
        (_sent(directory), SENT_KEPT_SECONDS, ""),
        (outbox_folder(directory), _LEFTOVER_SECONDS, "."),
    )
    for folder, longest, beginning in (*folders, (_claim_folder(directory), SENT_KEPT_SECONDS, "")):
        with suppress(OSError):
            for entry in os.scandir(folder):
                if entry.name.startswith(beginning) and now - entry.stat().st_mtime > longest:
                    Path(entry.path).unlink(missing_ok=True)

"""The book on disk: whole versions, of which the one with the highest number counts.

    state/alerts/book.json    state/alerts/book.d/NNNNNNNN.json    (see `tr11ops.versioned`)

Whoever is late reads the newer version and decides again, so no writer's change is lost.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tr11ops.alerts.book import Alert, Book, Event, Incident, Message
from tr11ops.detect.finding import Severity
from tr11ops.rundir import RunDirectory, make_shared
from tr11ops.versioned import VersionedFile
from trainer.state_file import DamagedFile, read_text

T = TypeVar("T")
SCHEMA = 1
VERSIONS_KEPT = 5
PATIENCE_SECONDS = 20.0


class NewerSchema(ValueError):
    """The book was written by a newer tr11: it must not be replaced by one that knows less."""


@dataclass(frozen=True)
class Stored:
    """A version of the book. `damage` says what was wrong with the newest, where an older one, or none, was read."""

    number: int
    book: Book
    damage: str = ""


def alerts_folder(directory: RunDirectory) -> Path:
    return directory.paths.state / "alerts"


def read_book(directory: RunDirectory) -> Stored:
    """The newest readable version; an empty book of number 0 where no look was ever made.

    Raises OSError when it cannot be read, ValueError when none of the versions is a book.
    """
    stored = _read(directory)
    if stored.damage and stored.book == Book():
        raise ValueError(stored.damage)
    return stored


def commit(directory: RunDirectory, change: Callable[[Book], tuple[Book, T]]) -> tuple[Stored, T]:
    """Put `change(newest book)` in place, and return it with what else `change` returned; it may run several times.

    Damaged versions are passed over: where no readable one is left, a new book is begun, and people are told again.
    Raises OSError as the file system does, TimeoutError when others were always faster, and ValueError when the book
    was written by a newer tr11.
    """
    versions = _versions(directory)
    make_shared(versions.folder)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        stored = _read(directory)
        book, more = change(stored.book)
        following = replace(stored, number=stored.number + 1, book=book)
        if versions.put(following.number, _text(following)):
            with suppress(OSError):  # the copy is for people; the versions are what counts
                versions.publish(lambda: _newest(directory))
            versions.tidy()
            return following, more
        if time.monotonic() > deadline:
            raise TimeoutError(f"{versions.folder} was changed by others for {PATIENCE_SECONDS:.0f} s on end")
        time.sleep(0.005 + secrets.randbelow(20) / 1000)


# ----------------------------------------------------------------------------- how
def _versions(directory: RunDirectory) -> VersionedFile:
    return VersionedFile(alerts_folder(directory) / "book.json", VERSIONS_KEPT)


def _read(directory: RunDirectory) -> Stored:
    """The newest readable version, numbered as the newest of all: a damaged number is never used again."""
    versions = _versions(directory)
    numbers = versions.numbers()
    highest = numbers[-1] if numbers else 0
    damage = ""
    places = [versions.file(number) for number in reversed(numbers)]
    for place in [*places, versions.copy]:
        try:
            text = read_text(place)
        except FileNotFoundError:
            if place in places:  # tidied away, or not seen yet by this host
                continue
            break
        except DamagedFile as error:
            damage = damage or f"{place} is not a book of alerts: it {error.what}"
            continue
        try:
            return Stored(highest, _book(json.loads(text), place), damage)
        except NewerSchema:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            damage = damage or f"{place} is not a book of alerts: {type(error).__name__}"
    return Stored(highest, Book(), damage)


def _newest(directory: RunDirectory) -> tuple[int, str]:
    stored = _read(directory)
    return stored.number, _text(stored)


# ----------------------------------------------------------------------------- text
def _text(version: Stored) -> str:
    value = {"schema": SCHEMA, "version": version.number, **asdict(version.book)}
    return json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=True) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Severity):
        return value.name
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _book(value: Any, place: Path) -> Book:
    if int(value["schema"]) > SCHEMA:
        raise NewerSchema(f"{place} was written by a newer tr11 (schema {value['schema']})")
    return Book(
        alerts=tuple(record(Alert, entry) for entry in value["alerts"]),
        closed=tuple(record(Incident, entry) for entry in value["closed"]),
        messages=tuple(record(Message, entry) for entry in value["messages"]),
        events=tuple(record(Event, entry) for entry in value["events"]),
        looked=_moment(value["looked"]),
        blind=tuple(map(str, value["blind"])),
        digested=_moment(value["digested"]),
        mailbox=_pair(value.get("mailbox")),
        answered=tuple(map(str, value.get("answered", ()))),
    )


def record(kind: type[T], value: dict[str, Any]) -> T:
    """A dataclass from its JSON object. Raises ValueError, KeyError or TypeError when it is not one of these."""
    known: dict[str, Any] = {}
    for entry in fields(kind):  # type: ignore[arg-type]
        if entry.name not in value:
            continue
        item = value[entry.name]
        if isinstance(item, str) and "Severity" in str(entry.type):
            item = Severity[item]
        elif isinstance(item, list):
            item = tuple(item)
        elif isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{entry.name} is not a number")
        known[entry.name] = item
    return kind(**known)


def _pair(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(item, int) for item in value):
        raise ValueError(f"{value!r} is not a place in a mailbox")
    return value[0], value[1]


def _moment(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a moment")
    return float(value)

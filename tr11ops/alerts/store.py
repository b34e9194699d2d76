"""The alert state on disk: whole versions, of which the one with the highest number counts.

    state/alerts/book.json    state/alerts/book.d/NNNNNNNN.json    (see `tr11ops.rundir.versioned`)

Anyone who is late reads the newer version and decides again, so no writer's change is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import fields, replace

from tr11ops.alerts.state import Alert, AlertEvent, AlertState, Consequence, Incident, Message
from tr11ops.base.errors import NewerSchema
from tr11ops.base.newer import newer_schema
from tr11ops.base.units import number_in
from tr11ops.detect.finding import Severity
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.versioned import VersionedFile
from trainer.contract.documents import document
from trainer.contract.errors import DamagedFile
from trainer.contract.record import Record
from trainer.contract.state_file import read_text

T = TypeVar("T")
SCHEMA = 1
VERSIONS_KEPT = 5


class StoredAlerts(Record):
    """A version of the alert state. `damage` says what was wrong with the newest, where an older one, or none, was
    read."""

    number: int
    alert_state: AlertState
    damage: str = ""


def alerts_folder(directory: RunDirectory) -> Path:
    return directory.paths.state / "alerts"


def read_alert_state(directory: RunDirectory) -> StoredAlerts:
    """The newest readable version; an empty state of number 0 where no look was ever made.

    Raises OSError when it cannot be read, ValueError when none of the versions is an alert state.
    """
    stored = _read(directory)
    if stored.damage and stored.alert_state == AlertState():
        raise ValueError(stored.damage)
    return stored


def commit(directory: RunDirectory, change: Callable[[AlertState], tuple[AlertState, T]]) -> tuple[StoredAlerts, T]:
    """Put `change(newest alert state)` in place, and return it with what else `change` returned; it may run several
    times.

    Damaged versions are passed over: where no readable one is left, a new state is begun, and people are told again.
    Raises OSError as the file system does, TimeoutError when others were always faster, and ValueError when the alert
    state was written by a newer tr11.
    """

    def following() -> tuple[int, str, tuple[StoredAlerts, T]]:
        stored = _read(directory)
        alert_state, more = change(stored.alert_state)
        made = replace(stored, number=stored.number + 1, alert_state=alert_state)
        return made.number, _text(made), (made, more)

    done = _versions(directory).commit(following, lambda: _newest(directory))
    assert done is not None
    return done


# ----------------------------------------------------------------------------- how
def _versions(directory: RunDirectory) -> VersionedFile:
    return VersionedFile(alerts_folder(directory) / "book.json", VERSIONS_KEPT)


def _read(directory: RunDirectory) -> StoredAlerts:
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
            damage = damage or f"{place} is not a file of alert state: it {error.what}"
            continue
        try:
            return StoredAlerts(highest, _alert_state(json.loads(text), place), damage)
        except NewerSchema:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            damage = damage or f"{place} is not a file of alert state: {type(error).__name__}"
    return StoredAlerts(highest, AlertState(), damage)


def _newest(directory: RunDirectory) -> tuple[int, str]:
    stored = _read(directory)
    return stored.number, _text(stored)


# ----------------------------------------------------------------------------- text
def _text(version: StoredAlerts) -> str:
    value = {"schema": SCHEMA, "version": version.number, **document(version.alert_state)}
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True) + "\n"


def _alert_state(value: Any, place: Path) -> AlertState:
    newer = newer_schema(place, value, SCHEMA)
    if newer:
        raise NewerSchema(newer)
    return AlertState(
        alerts=tuple(_alert(entry) for entry in value["alerts"]),
        closed=tuple(record(Incident, entry) for entry in value["closed"]),
        messages=tuple(record(Message, entry) for entry in value["messages"]),
        events=tuple(record(AlertEvent, entry) for entry in value["events"]),
        looked=_moment(value["looked"]),
        blind=tuple(map(str, value["blind"])),
        digested=_moment(value["digested"]),
        mailbox=_pair(value.get("mailbox")),
        answered=tuple(map(str, value.get("answered", ()))),
        finished=_moment(value.get("finished")),
    )


def _alert(value: dict[str, Any]) -> Alert:
    """An alert, with the records of what follows from it."""
    alert = record(Alert, {key: item for key, item in value.items() if key != "consequences"})
    return replace(alert, consequences=tuple(record(Consequence, one) for one in value.get("consequences", ())))


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
        elif isinstance(item, int | float) and not isinstance(item, bool) and number_in(item) is None:
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
    found = number_in(value)
    if found is None and value is not None:
        raise ValueError(f"{str(value)[:40]!r} is not a moment")
    return found

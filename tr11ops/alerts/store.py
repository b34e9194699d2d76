"""The alert state on disk: whole versions, of which the one with the highest number counts.

    state/alerts/book.json    state/alerts/book.d/NNNNNNNN.json    (see `tr11ops.rundir.versioned`)

Anyone who is late reads the newer version and decides again, so no writer's change is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from tr11ops.alerts.state import Alert, AlertState, Incident, merged
from tr11ops.base.observed import observing, why_only_read
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.versioned import VersionedFile
from trainer.contract.documents import document, record_of
from trainer.contract.errors import DamagedFile, NewerFormat
from trainer.contract.record import Record
from trainer.contract.state_file import read_text

T = TypeVar("T")
SCHEMA = 1
VERSIONS_KEPT = 5


class StoredAlerts(Record):
    """A version of the alert state. `damage` says what was wrong with the newest, where an older
    one, or none, was read.
    """

    number: int
    alert_state: AlertState
    damage: str = ""


def alerts_folder(directory: RunDirectory) -> Path:
    return directory.paths.state / "alerts"


def outbox_folder(directory: RunDirectory) -> Path:
    return alerts_folder(directory) / "outbox"


def read_alert_state(directory: RunDirectory) -> StoredAlerts:
    """The newest readable version; an empty state of number 0 where no look was ever made.

    Raises OSError when it cannot be read, ValueError when none of the versions is an alert state.
    """
    stored = _read(directory)
    if stored.damage and stored.alert_state == AlertState():
        raise ValueError(stored.damage)
    return stored


def commit(
    directory: RunDirectory, change: Callable[[AlertState], tuple[AlertState, T]]
) -> tuple[StoredAlerts, T]:
    """Put `change(newest alert state)` in place, and return it with what else `change` returned; it
    may run several times.

    Damaged versions are passed over: where no readable one is left, a new state is begun, and
    people are told again. Raises OSError as the file system does, TimeoutError when others were
    always faster, and ValueError when the alert state was written by a newer tr11.
    """
    more: list[T] = []

    def changed(stored: StoredAlerts) -> StoredAlerts:
        alert_state, found = change(stored.alert_state)
        more.append(found)
        return replace(stored, alert_state=alert_state)

    done = _versions(directory).commit(partial(_newest, directory), changed, _text)
    assert done is not None
    number, made = done
    return replace(made, number=number), more[-1]


# ----------------------------------------------------------------------------- how
def _versions(directory: RunDirectory) -> VersionedFile:
    return VersionedFile(alerts_folder(directory) / "book.json", VERSIONS_KEPT)


def _read(directory: RunDirectory) -> StoredAlerts:
    """The newest readable version, numbered as the newest of all: a damaged number is never used
    again.
    """
    versions = _versions(directory)
    numbers = versions.numbers()
    highest = 0
    if numbers:
        highest = numbers[-1]
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
            return StoredAlerts(highest, _alert_state(text, place), damage)
        except NewerFormat:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            damage = damage or f"{place} is not a file of alert state: {type(error).__name__}"
    return StoredAlerts(highest, AlertState(), damage)


def _newest(directory: RunDirectory) -> tuple[int, StoredAlerts]:
    stored = _read(directory)
    return stored.number, stored


# ----------------------------------------------------------------------------- text
def _text(number: int, version: StoredAlerts) -> str:
    value = {"schema": SCHEMA, "version": number, **document(version.alert_state)}
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True) + "\n"


def _alert_state(text: str, place: Path) -> AlertState:
    """Raises NewerFormat, and ValueError or TypeError for what is no file of alert state."""
    value = json.loads(text, parse_constant=_refuse)
    newer = why_only_read(value, SCHEMA)
    if newer:
        raise NewerFormat(f"{place} {newer}")
    if "alerts" not in value:
        raise ValueError("it names no alerts")
    return record_of(AlertState, value)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no moment")


# ----------------------------------------------------------------------------- what others read


def current_alert_state(directory: RunDirectory) -> AlertState:
    """What is known of the alerts, wherever it is kept: what a watchdog of this machine kept in its
    fallback directory, while the run directory could not be written, counts. Raises OSError and ValueError as
    `read_alert_state` does.
    """
    home = read_alert_state(directory).alert_state
    local = kept_here(directory)
    if local is None:
        return home
    return merged(home, local)


def kept_here(directory: RunDirectory) -> AlertState | None:
    """The alert state in this machine's fallback directory; None where there is none. Raises as
    `read_alert_state`.
    """
    local = existing_fallback(directory)
    if local is None:
        alert_state = AlertState()
    else:
        alert_state = read_alert_state(local).alert_state
    if alert_state == AlertState():
        return None
    return alert_state


@observing
def open_alerts(directory: RunDirectory) -> tuple[Alert, ...]:
    """The open alerts, the most severe first; empty where no look was ever made."""
    return current_alert_state(directory).open_alerts


@observing
def incidents(directory: RunDirectory) -> tuple[Incident, ...]:
    """Every incident, also those that are over, oldest first."""
    return current_alert_state(directory).incidents()

"""What a synchronisation knows from the last one. All of it can be found again from the hub, at the cost of reading.

state/sync/state.json      what the hub has, and which local file that was
state/sync/status.json     the last success, for the watchdog
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tr11ops.hub.base import Entry
from tr11ops.hub.sync_plan import Stamp
from tr11ops.rundir import RunDirectory, make_shared
from trainer.contract import read_json, write_json

SCHEMA = 1
LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class Known:
    """One file of the repository; `stamp` is the local file that was compared with it, if one was."""

    far: Entry
    stamp: Stamp | None = None


@dataclass(frozen=True)
class SyncState:
    """What the repository has in the commit `head`. `attributes` is the text of its .gitattributes.

    `published` is the material part of the status that was last published, `published_time` when that was.
    """

    endpoint: str
    repository: str
    head: str
    attributes: str = ""
    published: str = ""
    published_time: float = 0.0
    files: Mapping[str, Known] = field(default_factory=dict)

    def is_of(self, endpoint: str, repository: str) -> bool:
        """Whether this was found at that repository."""
        return (self.endpoint, self.repository) == (endpoint, repository)


def records_folder(directory: RunDirectory) -> Path:
    """Where the records lie."""
    return directory.paths.state / "sync"


def read_state(directory: RunDirectory) -> SyncState | None:
    """The last state; None when there is none, or none that can be understood. Raises OSError."""
    try:
        value = read_json(records_folder(directory) / "state.json")
        return None if value is None or value.get("schema") != SCHEMA else _parse(value)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _parse(value: Mapping[str, Any]) -> SyncState:
    texts = {name: value[name] for name in ("endpoint", "repository", "head", "attributes", "published")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("not a state")
    moment = value["published_time"]
    if not isinstance(moment, int | float):
        raise TypeError("not a state")
    return SyncState(
        **texts, published_time=moment, files={path: _known(entry) for path, entry in value["files"].items()}
    )


def _known(entry: Mapping[str, Any]) -> Known:
    far, stamp = Entry(**entry["far"]), None if entry["stamp"] is None else Stamp(**entry["stamp"])
    numbers = [far.bytes, *(() if stamp is None else (stamp.bytes, stamp.changed_ns, stamp.inode))]
    if not all(isinstance(number, int) for number in numbers) or not isinstance(far.oid, str):
        raise TypeError("not a state")
    return Known(far, stamp)


def write_state(directory: RunDirectory, state: SyncState) -> None:
    """Replace the state. Raises OSError."""
    make_shared(records_folder(directory))
    write_json(records_folder(directory) / "state.json", {"schema": SCHEMA, **asdict(state)})


def write_success(directory: RunDirectory, now: float) -> None:
    """Put on record that all was mirrored at `now`, seconds since the epoch. Raises OSError."""
    make_shared(records_folder(directory))
    write_json(records_folder(directory) / "status.json", {"schema": SCHEMA, "time": now, "step": None, "message": ""})


def write_failure(directory: RunDirectory, message: str) -> None:
    """Say beside the last success, if there ever was one, why the next did not come. Raises OSError."""
    path = records_folder(directory) / "status.json"
    try:
        last = read_json(path)
    except ValueError:
        return
    if last is not None:
        write_json(path, {**last, "message": message[:LONGEST_MESSAGE]})

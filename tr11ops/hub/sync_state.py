"""What a synchronisation knows from the last one. All of it can be found again from the hub, at the
cost of reading.

state/sync/state.json      what the hub has, and which local file that was
state/sync/status.json     the last success, for the watchdog, and the secrets that were ever found in the logs
state/sync/public.json     a person's word that a public repository is wanted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import field
from msgspec.structs import replace

from tr11ops.base.newer import replace_json
from tr11ops.hub.base import HubFile
from tr11ops.hub.sync_plan import Stamp
from tr11ops.observe.operation import FoundSecret, found_secrets
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document, record_of
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

SCHEMA = 1
LONGEST_MESSAGE = 300


class Known(Record, rename={"remote": "far"}):
    """One file of the repository; `stamp` is the local file that was compared with it, if one was."""

    remote: HubFile
    stamp: Stamp | None = None


class SyncState(Record):
    """What the repository has in the commit `head`. `attributes` is the text of its .gitattributes.

    `published` is the material part of the status that was last published, `published_time` when
    that was.
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
        if value is None or value.get("schema") != SCHEMA:
            return None
        return record_of(SyncState, value)
    except ValueError:
        return None


def write_state(directory: RunDirectory, state: SyncState) -> None:
    """Replace the state. Raises OSError."""
    replace_json(
        records_folder(directory) / "state.json", {"schema": SCHEMA, **document(state)}, SCHEMA
    )


def write_success(directory: RunDirectory, now: float, found: Sequence[FoundSecret] = ()) -> None:
    """Put on record that all was mirrored at `now`, seconds since the epoch. Raises OSError."""
    value: dict[str, Any] = {"schema": SCHEMA, "time": now, "step": None, "message": ""}
    listed = _with_record(directory, found)
    if listed:
        value["secrets"] = listed
    replace_json(_status_file(directory), value, SCHEMA)


def write_found(directory: RunDirectory, now: float, found: Sequence[FoundSecret]) -> None:
    """Put on record what was masked in a commit, at `now`: what comes after it may fail. Raises
    OSError.
    """
    begun = {
        "schema": SCHEMA,
        "time": now,
        "step": None,
        "message": "not all of it is mirrored yet",
    }
    last = _read_status(directory) or begun
    replace_json(
        _status_file(directory), {**last, "secrets": _with_record(directory, found)}, SCHEMA
    )


def _with_record(directory: RunDirectory, found: Sequence[FoundSecret]) -> list[dict[str, Any]]:
    """The secrets of a round with those on record, which hold: a person may have revoked some
    during the round.
    """
    both = {(secret.path, secret.kind): secret for secret in (*found, *read_found(directory))}
    return [document(secret) for secret in both.values()]


def read_found(directory: RunDirectory) -> tuple[FoundSecret, ...]:
    """The secrets of earlier synchronisations; none where the record cannot be read, so that they
    are told again.
    """
    try:
        return found_secrets((read_json(_status_file(directory)) or {}).get("secrets", []))
    except (OSError, ValueError, AttributeError):
        return ()


def write_revoked(directory: RunDirectory, now: float) -> tuple[FoundSecret, ...]:
    """Put on record that the secrets found so far are of no use any more; returns those. Raises
    OSError.
    """
    found = read_found(directory)
    revoked = tuple(secret for secret in found if secret.revoked is None)
    if revoked:
        entries = [
            document(secret if secret.revoked is not None else replace(secret, revoked=now))
            for secret in found
        ]
        replace_json(
            _status_file(directory), {**(_read_status(directory) or {}), "secrets": entries}, SCHEMA
        )
        told = "; ".join(str(secret) for secret in revoked)
        Journal(directory.journal).write(
            "sync-revoked", f"revoked: {told}", {"secrets": len(revoked)}
        )
    return revoked


def is_confirmed(directory: RunDirectory, endpoint: str, repository: str) -> bool:
    """Whether a person wants this repository to be public. Raises OSError."""
    try:
        value = read_json(records_folder(directory) / "public.json") or {}
    except ValueError:
        return False
    return (value.get("endpoint"), value.get("repository")) == (endpoint, repository)


def write_confirmed(directory: RunDirectory, endpoint: str, repository: str, now: float) -> None:
    """Put a person's word for a public repository on record, and into the journal. Raises OSError."""
    value = {"schema": SCHEMA, "endpoint": endpoint, "repository": repository, "time": now}
    replace_json(records_folder(directory) / "public.json", value, SCHEMA)
    Journal(directory.journal).write(
        "sync-public", f"{repository} may be public", {"repository": repository}
    )


def write_failure(directory: RunDirectory, message: str) -> None:
    """Say beside the last success, if there ever was one, why the next did not come. Raises
    OSError.
    """
    last = _read_status(directory)
    if last is not None:
        replace_json(
            _status_file(directory), {**last, "message": message[:LONGEST_MESSAGE]}, SCHEMA
        )


def _status_file(directory: RunDirectory) -> Path:
    return records_folder(directory) / "status.json"


def _read_status(directory: RunDirectory) -> dict[str, Any] | None:
    """What status.json holds; None for garbage, too."""
    try:
        return read_json(_status_file(directory))
    except ValueError:
        return None

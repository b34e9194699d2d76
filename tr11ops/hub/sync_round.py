"""What one synchronisation is given and knows from the last one, how it is recorded, and how one
follows another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.base.errors import HubError, HubUnavailable
from tr11ops.base.observed import cause, replace_json
from tr11ops.base.retry import RetryPolicy
from tr11ops.base.units import duration, span_seconds
from tr11ops.hub.base import HubFile, Progress, Repository
from tr11ops.hub.sync_plan import Note, Send, Stamp
from tr11ops.observe.observations import FoundSecret, found_secrets
from tr11ops.rundir.claims import ClaimTaken
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document, record_of
from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_json
from trainer.contract.units import shortened

if TYPE_CHECKING:
    from tr11ops.hub.client import Hub


# What a synchronisation knows from the last one. All of it can be found again from the hub, at the
# cost of reading.
#
# state/sync/state.json      what the hub has, and which local file that was
# state/sync/status.json     the last success, for the watchdog, and the secrets that were ever found in the logs
# state/sync/public.json     a person's word that a public repository is wanted

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
    files: Mapping[str, Known] = {}

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
    value: JsonObject = {"schema": SCHEMA, "time": now, "step": None, "message": ""}
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


def _with_record(directory: RunDirectory, found: Sequence[FoundSecret]) -> list[JsonObject]:
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
            _status_file(directory),
            {**last, "message": shortened(message, LONGEST_MESSAGE)},
            SCHEMA,
        )


def _status_file(directory: RunDirectory) -> Path:
    return records_folder(directory) / "status.json"


def _read_status(directory: RunDirectory) -> JsonObject | None:
    """What status.json holds; None for garbage, too."""
    try:
        return read_json(_status_file(directory))
    except ValueError:
        return None


class SyncSettings(Record):
    """What is mirrored where. `status` gives the file that is published along, `say` hears what a
    person should know.

    `folder` is mirrored at the root of the repository; `clock` gives seconds since the epoch.
    """

    hub: Hub
    repository: Repository
    directory: RunDirectory
    patterns: tuple[str, ...]
    private: bool  # false: a person wants the logs to be public
    status: Callable[[], bytes | None]
    clock: Callable[[], float]
    say: Callable[[str], None]
    progress: Callable[[tuple[Send, ...]], Progress | None] = lambda sends: None

    @property
    def folder(self) -> Path:
        return self.directory.paths.published


class SyncOutcome(Record):
    """What one synchronisation did, or would do. `files` and `bytes` are those that the hub now has
    of this run.
    """

    repository: str
    sends: tuple[Send, ...] = ()
    commits: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0
    head: str = ""
    status_sent: bool = False
    found: tuple[FoundSecret, ...] = ()
    notes: tuple[Note, ...] = ()
    faults: tuple[Note, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Bytes of the files that were sent, each whole."""
        return sum(send.bytes for send in self.sends)


# Synchronising on and on: through days without the hub, and until a signal ends it.

FIRST_PAUSE_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 3600.0
SHORTEST_INTERVAL_SECONDS = 60.0
LONGEST_INTERVAL_SECONDS = 30 * 86400.0


class LoopClock(Record):
    """`steady` never goes back; `wait` returns true when it is time to end; `chance` gives 0..1."""

    steady: Callable[[], float]
    wait: Callable[[float], bool]
    chance: Callable[[], float]


def seconds_of(text: str) -> float:
    """`90s`, `30m`, `1h`, `2d`; a bare number is in minutes. Raises ValueError."""
    try:
        seconds = span_seconds(text, "m")
    except ValueError:
        seconds = 0.0
    if not SHORTEST_INTERVAL_SECONDS <= seconds <= LONGEST_INTERVAL_SECONDS:
        raise ValueError("write it as 30m, 1h or 1d; at least 1 minute, at most 30 days")
    return seconds


def follow(
    round_: Callable[[], SyncOutcome],
    interval: float,
    clock: LoopClock,
    show: Callable[[SyncOutcome], None],
    say: Callable[[str], None],
) -> None:
    """A round each `interval` seconds, counted from its beginning, until `clock.wait` says that it
    is enough.

    What fails is said once, and that it works again; meanwhile it is tried with growing pauses, as
    the hub asks.
    """
    trouble, since, failures = "", 0.0, 0
    retries = RetryPolicy(
        first_seconds=FIRST_PAUSE_SECONDS,
        longest_seconds=min(LONGEST_PAUSE_SECONDS, interval),
        jitter=(0.75, 1.25),
        longest_asked_seconds=math.inf,
        chance=clock.chance,
    )
    while True:
        begin = clock.steady()
        try:
            outcome = round_()
        except (HubError, ClaimTaken, OSError) as error:
            if isinstance(error, ClaimTaken):
                text = f"it runs already: {error}"
            else:
                text = cause(error)
            since = since if trouble else begin
            if text != trouble:
                say(f"{text}; trying on")
            trouble = text
            asked = error.wait if isinstance(error, HubUnavailable) else 0.0
            failures += 1
            delay = retries.delay(failures, asked)
        else:
            if trouble:
                say(f"it works again, after {duration(begin - since)}")
            trouble, failures = "", 0
            show(outcome)
            delay = max(0.0, interval - (clock.steady() - begin))
        if clock.wait(delay):
            return

"""What one synchronisation is given and knows from the last one, what it gathers on its way, what
it knows of the hub, and how it is recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from tr11ops.base.errors import HubMissing, HubPermanentError, HubUnavailable, PublicRepository
from tr11ops.base.newer import replace_json
from tr11ops.base.observed import cause
from tr11ops.hub import sync_plan
from tr11ops.hub.base import FILE_NAME as STATUS_FILE
from tr11ops.hub.base import HubFile, Progress, Repository
from tr11ops.hub.sync_files import RunningDigests, git_name
from tr11ops.hub.sync_plan import Note, Send, Stamp
from tr11ops.observe.operation import FoundSecret, found_secrets
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
    files: Mapping[str, Known] = msgspec.field(default_factory=dict)

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


READINGS = 3  # of a file that comes garbled
PUBLIC = "is public: everyone will read these logs; type tr11 sync --public once if this is wanted"


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


@dataclass
class SyncRound:
    """What is gathered in the course of one synchronisation."""

    setting: SyncSettings
    running: RunningDigests
    state: SyncState | None = None
    written: SyncState | None = None
    sends: list[Send] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    status_sent: bool = False
    told: set[str] = field(default_factory=set)
    found: dict[tuple[str, str], FoundSecret] = field(default_factory=dict)

    def tell(self, text: str) -> None:
        """Let the person know, once."""
        if text not in self.told:
            self.told.add(text)
            self.setting.say(text)


# ----------------------------------------------------------------------------- what the hub has
def head(this: SyncRound, rebuild: bool) -> str:
    """The repository's newest commit. One that was never seen is made; one that was there and is
    gone is not.
    """
    setting = this.setting
    if this.state is None and not rebuild:
        try:
            this.state = this.written = read_state(setting.directory)
        except OSError as error:
            this.tell(
                f"the record of the last synchronisation cannot be read ({cause(error)}): comparing again"
            )
    if (
        rebuild
        or this.state is None
        or not this.state.is_of(setting.hub.endpoint, setting.repository.name)
    ):
        setting.hub.ensure_repository(setting.repository, setting.private)
    try:
        commit, is_private = setting.hub.newest(setting.repository)
    except HubMissing as error:
        raise HubPermanentError(
            f"{setting.repository.name}: was there, and is gone, or this account may not see it any more; "
            "tr11 sync --rebuild makes it again",
            error.status,
        ) from None
    if not is_private and not may_be_public(this):
        raise PublicRepository(f"{setting.repository.name}: {PUBLIC}")
    return commit


def may_be_public(this: SyncRound) -> bool:
    """Whether a person wants everyone to read the logs: by the card's hub.private, or by a word
    that is on record.
    """
    setting = this.setting
    if not setting.private:
        return True
    try:
        return is_confirmed(setting.directory, setting.hub.endpoint, setting.repository.name)
    except OSError as error:
        this.tell(f"whether the repository may be public cannot be read: {cause(error)}")
        return False


def acquaint(this: SyncRound, head: str, rebuild: bool) -> SyncState:
    """What the commit `head` holds: as it is on record if the record is of this commit, else as the
    hub tells it.
    """
    hub, repository, state = this.setting.hub, this.setting.repository, this.state
    if state is None or rebuild or not state.is_of(hub.endpoint, repository.name):
        state = SyncState(hub.endpoint, repository.name, "")
    if state.head == head:
        return state
    tree = hub.list_tree(repository, revision=head)
    rules = tree.get(sync_plan.FILE_NAME)
    if rules is None:
        text = ""
    else:
        text = _rules(this, rules, head)
    published = (
        state.published if _is_same(state.files.get(STATUS_FILE), tree.get(STATUS_FILE)) else ""
    )
    files = {
        path: Known(
            remote,
            known.stamp
            if (known := state.files.get(path)) is not None and known.remote == remote
            else None,
        )
        for path, remote in tree.items()
    }
    return replace(state, head=head, attributes=text, published=published, files=files)


def _rules(this: SyncRound, remote: HubFile, head: str) -> str:
    """The .gitattributes of a commit. Raises HubUnavailable when what comes is something else, as a
    proxy's page.
    """
    for _ in range(READINGS):
        content = this.setting.hub.read(this.setting.repository, sync_plan.FILE_NAME, revision=head)
        if remote.sha256 is None:
            name = git_name(content)
        else:
            name = hashlib.sha256(content).hexdigest()
        if name == (remote.sha256 or remote.oid):
            return content.decode("utf-8", "surrogateescape")
    raise HubUnavailable(f"{this.setting.repository.name}: {sync_plan.FILE_NAME} comes garbled")


def _is_same(known: Known | None, remote: HubFile | None) -> bool:
    return known is not None and known.remote == remote


# ----------------------------------------------------------------------------- records
def on_record(this: SyncRound, state: SyncState) -> SyncState:
    """Write down what the hub has now, if that is news; returns it."""
    this.state = state
    if state != this.written:
        record(this, lambda: write_state(this.setting.directory, state))
        this.written = state
    return state


def record(this: SyncRound, write: Callable[[], object]) -> None:
    """Write a record; where that fails the logs are mirrored all the same, and the next round
    compares again.
    """
    try:
        write()
    except OSError as error:
        this.tell(
            f"this synchronisation cannot be put on record in {this.setting.directory.root}: {error.strerror or error}"
        )


def remember(this: SyncRound, sends: Iterable[Send]) -> None:
    """Say what was masked in what was sent, once for each file and kind of secret."""
    for send in sends:
        if send.reason == "masked":
            this.tell(
                f"{send.path}: older commits at the hub have its secrets unmasked; delete the history there"
            )
        for mask in send.masks:
            if not mask.kind or (send.path, mask.kind) in this.found:
                continue
            secret = FoundSecret(send.path, mask.kind, mask.line, this.setting.clock())
            this.found[send.path, mask.kind] = secret
            this.tell(f"{secret}: masked at the hub, not here; make it invalid where it was issued")


def journal(this: SyncRound, head: str, message: str, expected: Mapping[str, int]) -> None:
    """An entry for one commit; `expected` are the bytes of each path in it."""
    data = {
        "repository": this.setting.repository.name,
        "commit": head,
        "files": len(expected),
        "bytes": sum(expected.values()),
    }
    record(this, lambda: Journal(this.setting.directory.journal).write("sync", message, data))

"""What one synchronisation is given, what it gathers on its way, what it knows of the hub, and how
it is recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.base.errors import HubMissing, HubPermanentError, HubUnavailable, PublicRepository
from tr11ops.base.observed import cause
from tr11ops.hub import attributes
from tr11ops.hub.base import FILE_NAME as STATUS_FILE
from tr11ops.hub.base import HubFile, Repository
from tr11ops.hub.sync_files import RunningDigests, git_name
from tr11ops.hub.sync_plan import Note, Send
from tr11ops.hub.sync_state import Known, SyncState, is_confirmed, read_state, write_state
from tr11ops.observe.operation import FoundSecret
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.hub.base import Progress
    from tr11ops.hub.client import Hub

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
    rules = tree.get(attributes.FILE_NAME)
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
        content = this.setting.hub.read(
            this.setting.repository, attributes.FILE_NAME, revision=head
        )
        if remote.sha256 is None:
            name = git_name(content)
        else:
            name = hashlib.sha256(content).hexdigest()
        if name == (remote.sha256 or remote.oid):
            return content.decode("utf-8", "surrogateescape")
    raise HubUnavailable(f"{this.setting.repository.name}: {attributes.FILE_NAME} comes garbled")


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

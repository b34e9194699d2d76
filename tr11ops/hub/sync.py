"""One synchronisation: what is whole and new in the run's logs goes to the hub, normally in one
commit.

Safe at any point and any number of times: a commit names its parent, so of two that run at once one
is told to look again; and what the hub has is known from its newest commit's id, so a record that
was lost costs a reading, no more. Nothing is ever deleted or overwritten there that could not be
found again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from tr11ops.base.errors import (
    FileChanged,
    HubConflict,
    HubError,
    HubMissing,
    HubPermanentError,
    HubUnavailable,
    PublicRepository,
)
from tr11ops.base.observed import cause
from tr11ops.hub import sync_plan
from tr11ops.hub.base import FILE_NAME as STATUS_FILE, Add, HubCopy, HubFile, Operation, Progress
from tr11ops.hub.sync_files import RunningDigests, Scan, git_name, measure, scan
from tr11ops.hub.sync_plan import (
    Note,
    Send,
    batches,
    commit_message,
    is_worth_a_commit,
    judge,
    material,
)
from tr11ops.hub.sync_round import (
    Known,
    SyncOutcome,
    SyncSettings,
    SyncState,
    is_confirmed,
    read_found,
    read_state,
    write_failure,
    write_found,
    write_state,
    write_success,
)
from tr11ops.observe.observations import FoundSecret
from tr11ops.rundir.claims import Claim, ClaimFolder
from tr11ops.rundir.journal import Journal
from trainer.contract.record import Record

CLAIM = "hub-sync"  # the periodic job of the name "sync" has its own claim
CLAIM_SECONDS = 6 * 3600.0
LOOKS = 8  # at a repository to which others commit all the time
READINGS = 3  # of a file that comes garbled
PUBLIC = "is public: everyone will read these logs; type tr11 sync --public once if this is wanted"
ROOT_FILES = (sync_plan.FILE_NAME, STATUS_FILE, "README.md")


class _Plan(Record):
    """What one look found: the files to send, those left alone, and the state with what was learned
    on the way.
    """

    sends: tuple[Send, ...]
    notes: tuple[Note, ...]
    faults: tuple[Note, ...]
    state: SyncState


@dataclass
class SyncRound:
    """One synchronisation, and what is gathered in the course of it."""

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

    # ------------------------------------------------------------------ the claim
    def take(self) -> Claim | None:
        """The claim on this run's mirror; None where none can be written, which costs safety
        nothing. Raises ClaimTaken.
        """
        setting, folder = self.setting, ClaimFolder(self.setting.directory, CLAIM)
        try:
            return folder.acquire(setting.clock(), CLAIM_SECONDS)
        except OSError as error:
            self.tell(
                f"two at once are not kept apart now: no claim can be written ({error.strerror or error})"
            )
            return None

    # ------------------------------------------------------------------ the round
    def until_steady(self, rebuild: bool) -> SyncOutcome:
        """Look and send, and again when the hub or a file was changed by someone else meanwhile."""
        setting = self.setting
        for look in range(LOOKS):
            self.state = self.acquaint(self._head(rebuild and look == 0), rebuild and look == 0)
            found = scan(setting.folder, setting.patterns, ROOT_FILES)
            plan = self.plan(self.state, found)
            self.state = plan.state
            try:
                state = self._carry_out(plan)
            except (
                HubConflict,
                FileChanged,
                OSError,
            ) as change:  # a file may have gone since it was measured
                self.tell(f"{cause(change)}: looking again")
                continue
            self._on_record(state)
            return self.outcome(state, found=found, plan=plan, sends=tuple(self.sends))
        raise HubUnavailable(
            f"{setting.repository.name}: it, or the logs, changed {LOOKS} times while they were compared"
        )

    def plan(self, state: SyncState, found: Scan) -> _Plan:
        """What is to be sent of what was found, and what is learned by looking at it."""
        sends, notes, faults = [], list(found.skipped), list(found.faults)
        files, now = dict(state.files), self.setting.clock()
        taken = {*files, *(file.path for file in found.files)}
        for file in found.files:
            if file.form == "whole" and not file.is_quiet(now):
                continue
            known = files.get(file.path)
            remote = known.remote if known is not None else None
            if (
                known is not None
                and known.stamp == file.stamp
                and (known.remote.bytes == file.bytes or not file.is_quiet(now))
            ):
                continue
            try:
                measured = measure(
                    self.setting.folder,
                    file,
                    remote=remote,
                    remote_head=partial(self._read, file.path, state.head),
                    running=self.running,
                    now=now,
                )
            except FileNotFoundError:
                continue  # it went since it was listed; what the hub has of it stays
            except OSError as error:
                faults.append(Note(file.path, f"cannot be read ({cause(error)})"))
                continue
            except FileChanged:
                continue  # the next round sees what became of it
            verdict = judge(measured, remote, taken)
            if isinstance(verdict, Send):
                sends.append(verdict)
            elif isinstance(verdict, Note):
                notes.append(verdict)
            elif known is not None and file.bytes >= known.remote.bytes:
                files[file.path] = Known(known.remote, file.stamp)
        return _Plan(tuple(sends), tuple(notes), tuple(faults), replace(state, files=files))

    def _carry_out(self, plan: _Plan) -> SyncState:
        """Make the commits of a plan; each is on record before the next."""
        state, setting = plan.state, self.setting
        status = self._status()
        names = [name for send in plan.sends for name in (send.path, send.superseded) if name]
        rules = sync_plan.with_rules(state.attributes, names)
        # a commit of its own: the hub decides by the rules that it has
        if rules != state.attributes:
            content = rules.encode("utf-8", "surrogateescape")
            add = Add(sync_plan.FILE_NAME, content)
            state = self._commit(
                state,
                operations=(add,),
                message=f"{sync_plan.FILE_NAME}: logs are large files",
                expected={add.path: len(content)},
            )
            state = self._on_record(replace(state, attributes=rules))
        progress = None
        if plan.sends:
            progress = setting.progress(plan.sends)
        remaining = list(batches(plan.sends))
        for number, batch in enumerate(remaining, start=1):
            operations: list[Operation] = [
                HubCopy(send.superseded, send.path) for send in batch if send.superseded
            ]
            operations += [
                Add(
                    send.path,
                    setting.folder / send.path,
                    size=send.bytes,
                    sha256=send.sha256,
                    masks=send.masks,
                )
                for send in batch
            ]
            expected = {send.path: send.bytes for send in batch}
            is_last = number == len(remaining)
            if is_last and status is not None:
                operations.append(Add(STATUS_FILE, status))
                expected[STATUS_FILE] = len(status)
            state = self._commit(
                state,
                operations=tuple(operations),
                message=commit_message(batch),
                expected=expected,
                batch=batch,
                progress=progress,
            )
            if is_last and status is not None:
                state = self._published(state, status)
            state = self._on_record(state)
        age = setting.clock() - state.published_time
        if status is not None and not remaining and is_worth_a_commit(status, state.published, age):
            state = self._commit(
                state,
                operations=(Add(STATUS_FILE, status),),
                message=STATUS_FILE,
                expected={STATUS_FILE: len(status)},
            )
            state = self._on_record(self._published(state, status))
        return state

    def _read(self, path: str, head: str, length: int | None = None) -> bytes:
        """A file of a commit, or its beginning."""
        setting = self.setting
        return setting.hub.read(setting.repository, path, length=length, revision=head)

    def _published(self, state: SyncState, status: bytes) -> SyncState:
        return replace(state, published=material(status), published_time=self.setting.clock())

    def _commit(
        self,
        state: SyncState,
        operations: tuple[Operation, ...],
        message: str,
        expected: Mapping[str, int],
        batch: tuple[Send, ...] = (),
        progress: Progress | None = None,
    ) -> SyncState:
        """One commit on top of `state`; then the hub is asked what it has now of these paths.

        Raises HubPermanentError when that is not what was sent, and as `Hub.commit`.
        """
        setting = self.setting
        made = setting.hub.commit(
            setting.repository, operations, message, parent=state.head, progress=progress
        )
        if made != state.head:
            self.commits.append(made)
            self._journal(made, message, expected)
        known_before = len(self.found)
        self._remember(batch)
        if len(self.found) > known_before:
            found = tuple(self.found.values())
            self.record(lambda: write_found(setting.directory, setting.clock(), found))
        names = [*expected, *(send.superseded for send in batch if send.superseded)]
        there = setting.hub.look(setting.repository, names, revision=made)
        digests = {send.path: send.sha256 for send in batch}
        for path, size in expected.items():
            remote = there.get(path)
            if (
                remote is None
                or remote.bytes != size
                or (remote.sha256 and path in digests and remote.sha256 != digests[path])
            ):
                raise HubPermanentError(
                    f"{setting.repository.name}: {path} is not there as it was sent; is it in a .gitignore there?"
                )
        stamps = {send.path: send.file.stamp for send in batch}
        files = {
            **state.files,
            **{path: Known(remote, stamps.get(path)) for path, remote in there.items()},
        }
        self.sends += batch
        self.status_sent |= STATUS_FILE in expected
        return replace(state, head=made, files=files)

    def _status(self) -> bytes | None:
        """The status to publish; None where there is none, or where it cannot be made: the logs go
        all the same.
        """
        try:
            return self.setting.status()
        except (OSError, ValueError) as error:
            self.tell(f"{STATUS_FILE} is not published this time: {cause(error)}")
            return None

    def outcome(
        self, state: SyncState, found: Scan, plan: _Plan, sends: tuple[Send, ...]
    ) -> SyncOutcome:
        """What came of it, with what the hub has then."""
        ours = [state.files[file.path].remote for file in found.files if file.path in state.files]
        return SyncOutcome(
            repository=self.setting.repository.name,
            sends=sends,
            commits=tuple(self.commits),
            files=len(ours),
            bytes=sum(remote.bytes for remote in ours),
            head=state.head,
            found=tuple(self.found.values()),
            status_sent=self.status_sent,
            notes=plan.notes,
            faults=plan.faults,
        )

    # ------------------------------------------------------------------ what the hub has
    def _head(self, rebuild: bool) -> str:
        """The repository's newest commit. One that was never seen is made; one that was there and
        is gone is not.
        """
        setting = self.setting
        if self.state is None and not rebuild:
            try:
                self.state = self.written = read_state(setting.directory)
            except OSError as error:
                self.tell(
                    f"the record of the last synchronisation cannot be read ({cause(error)}): comparing again"
                )
        if (
            rebuild
            or self.state is None
            or not self.state.is_of(setting.hub.endpoint, setting.repository.name)
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
        if not is_private and not self.may_be_public():
            raise PublicRepository(f"{setting.repository.name}: {PUBLIC}")
        return commit

    def may_be_public(self) -> bool:
        """Whether a person wants everyone to read the logs: by the card's hub.private, or by a word
        that is on record.
        """
        setting = self.setting
        if not setting.private:
            return True
        try:
            return is_confirmed(setting.directory, setting.hub.endpoint, setting.repository.name)
        except OSError as error:
            self.tell(f"whether the repository may be public cannot be read: {cause(error)}")
            return False

    def acquaint(self, head: str, rebuild: bool) -> SyncState:
        """What the commit `head` holds: as it is on record if the record is of this commit, else as the
        hub tells it.
        """
        hub, repository, state = self.setting.hub, self.setting.repository, self.state
        if state is None or rebuild or not state.is_of(hub.endpoint, repository.name):
            state = SyncState(hub.endpoint, repository.name, "")
        if state.head == head:
            return state
        tree = hub.list_tree(repository, revision=head)
        rules = tree.get(sync_plan.FILE_NAME)
        if rules is None:
            text = ""
        else:
            text = self._rules(rules, head)
        published, status = "", state.files.get(STATUS_FILE)
        if status is not None and status.remote == tree.get(STATUS_FILE):
            published = state.published
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

    def _rules(self, remote: HubFile, head: str) -> str:
        """The .gitattributes of a commit. Raises HubUnavailable when what comes is something else, as a
        proxy's page.
        """
        for _ in range(READINGS):
            content = self._read(sync_plan.FILE_NAME, head)
            if remote.sha256 is None:
                name = git_name(content)
            else:
                name = hashlib.sha256(content).hexdigest()
            if name == (remote.sha256 or remote.oid):
                return content.decode("utf-8", "surrogateescape")
        raise HubUnavailable(f"{self.setting.repository.name}: {sync_plan.FILE_NAME} comes garbled")

    # ------------------------------------------------------------------ records
    def _on_record(self, state: SyncState) -> SyncState:
        """Write down what the hub has now, if that is news; returns it."""
        self.state = state
        if state != self.written:
            self.record(lambda: write_state(self.setting.directory, state))
            self.written = state
        return state

    def record(self, write: Callable[[], object]) -> None:
        """Write a record; where that fails the logs are mirrored all the same, and the next round
        compares again.
        """
        try:
            write()
        except OSError as error:
            place, why = self.setting.directory.root, error.strerror or error
            self.tell(f"this synchronisation cannot be put on record in {place}: {why}")

    def _remember(self, sends: Iterable[Send]) -> None:
        """Say what was masked in what was sent, once for each file and kind of secret."""
        for send in sends:
            if send.reason == "masked":
                self.tell(
                    f"{send.path}: older commits at the hub have its secrets unmasked; delete the history there"
                )
            for mask in send.masks:
                if not mask.kind or (send.path, mask.kind) in self.found:
                    continue
                secret = FoundSecret(send.path, mask.kind, mask.line, self.setting.clock())
                self.found[send.path, mask.kind] = secret
                self.tell(
                    f"{secret}: masked at the hub, not here; make it invalid where it was issued"
                )

    def _journal(self, head: str, message: str, expected: Mapping[str, int]) -> None:
        """An entry for one commit; `expected` are the bytes of each path in it."""
        data = {
            "repository": self.setting.repository.name,
            "commit": head,
            "files": len(expected),
            "bytes": sum(expected.values()),
        }
        self.record(lambda: Journal(self.setting.directory.journal).write("sync", message, data))


def sync_once(
    setting: SyncSettings, running: RunningDigests | None = None, rebuild: bool = False
) -> SyncOutcome:
    """Bring the repository up to date. `running` is kept from round to round by who does many.

    Raises ClaimTaken, HubUnavailable, HubPermanentError, and OSError when the mirrored folder cannot be
    read.
    """
    work = SyncRound(setting, running or RunningDigests())
    claim = work.take()
    try:
        work.found = {
            (secret.path, secret.kind): secret for secret in read_found(setting.directory)
        }
        outcome = work.until_steady(rebuild)
    except HubError as error:
        why = str(error)
        work.record(lambda: write_failure(setting.directory, why))
        raise
    else:
        found = tuple(work.found.values())
        work.record(lambda: write_success(setting.directory, setting.clock(), found))
    finally:
        if claim is not None:
            with suppress(OSError):  # it ends with this process, or with its time
                ClaimFolder(setting.directory, CLAIM).release(claim)
    return outcome


def preview(setting: SyncSettings, rebuild: bool = False) -> SyncOutcome:
    """What `sync_once` would send now. Nothing is changed anywhere. Raises as it does, but for
    ClaimTaken.
    """
    work = SyncRound(setting, RunningDigests())
    try:
        if rebuild:
            work.state = None
        else:
            work.state = read_state(setting.directory)
        commit, is_private = setting.hub.newest(setting.repository)
        if not is_private and not work.may_be_public():
            work.tell(f"{setting.repository.name}: {PUBLIC}")
        state = work.acquaint(commit, rebuild)
    except HubMissing:
        state = SyncState(setting.hub.endpoint, setting.repository.name, "")
    found = scan(setting.folder, setting.patterns, ROOT_FILES)
    plan = work.plan(state, found)
    return work.outcome(plan.state, found=found, plan=plan, sends=plan.sends)

"""One synchronisation: what is whole and new in the run's logs goes to the hub, normally in one
commit.

Safe at any point and any number of times: a commit names its parent, so of two that run at once one
is told to look again; and what the hub has is known from its newest commit's id, so a record that
was lost costs a reading, no more. Nothing is ever deleted or overwritten there that could not be
found again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress

from msgspec.structs import replace

from tr11ops.base.errors import (
    Busy,
    FileChanged,
    HubConflict,
    HubError,
    HubMissing,
    HubPermanentError,
    HubUnavailable,
)
from tr11ops.base.observed import cause
from tr11ops.base.retry import RetryPolicy
from tr11ops.base.units import duration, span_seconds
from tr11ops.hub import sync_plan
from tr11ops.hub.base import FILE_NAME as STATUS_FILE
from tr11ops.hub.base import Add, HubCopy, Operation, Progress
from tr11ops.hub.sync_files import RunningDigests, Scan, measure, scan
from tr11ops.hub.sync_plan import (
    LocalFile,
    Note,
    Send,
    batches,
    commit_message,
    is_worth_a_commit,
    judge,
    material,
)
from tr11ops.hub.sync_round import (
    PUBLIC,
    Known,
    SyncOutcome,
    SyncRound,
    SyncSettings,
    SyncState,
    acquaint,
    head,
    journal,
    may_be_public,
    on_record,
    read_found,
    read_state,
    record,
    remember,
    write_failure,
    write_found,
    write_success,
)
from tr11ops.rundir.claims import Claim, ClaimFolder, ClaimTaken
from trainer.contract.record import Record

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
        except (HubError, Busy, OSError) as error:
            if isinstance(error, Busy):
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


CLAIM = "hub-sync"  # the periodic job of the name "sync" has its own claim
CLAIM_SECONDS = 6 * 3600.0
LOOKS = 8  # at a repository to which others commit all the time
ROOT_FILES = (sync_plan.FILE_NAME, STATUS_FILE, "README.md")


def sync_once(
    setting: SyncSettings, running: RunningDigests | None = None, rebuild: bool = False
) -> SyncOutcome:
    """Bring the repository up to date. `running` is kept from round to round by who does many.

    Raises Busy, HubUnavailable, HubPermanentError, and OSError when the mirrored folder cannot be
    read.
    """
    this = SyncRound(setting, running or RunningDigests())
    claim = _take(this)
    try:
        this.found = {
            (secret.path, secret.kind): secret for secret in read_found(setting.directory)
        }
        outcome = _until_steady(this, rebuild)
    except HubError as error:
        why = str(error)
        record(this, lambda: write_failure(setting.directory, why))
        raise
    else:
        found = tuple(this.found.values())
        record(this, lambda: write_success(setting.directory, setting.clock(), found))
    finally:
        if claim is not None:
            with suppress(OSError):  # it ends with this process, or with its time
                ClaimFolder(setting.directory, CLAIM).release(claim)
    return outcome


def preview(setting: SyncSettings, rebuild: bool = False) -> SyncOutcome:
    """What `sync_once` would send now. Nothing is changed anywhere. Raises as it does, but for
    Busy.
    """
    this = SyncRound(setting, RunningDigests())
    try:
        if rebuild:
            this.state = None
        else:
            this.state = read_state(setting.directory)
        commit, is_private = setting.hub.newest(setting.repository)
        if not is_private and not may_be_public(this):
            this.tell(f"{setting.repository.name}: {PUBLIC}")
        state = acquaint(this, commit, rebuild)
    except HubMissing:
        state = SyncState(setting.hub.endpoint, setting.repository.name, "")
    found = scan(setting.folder, setting.patterns, ROOT_FILES)
    plan = _plan(this, state, found)
    return _outcome(this, plan.state, found=found, plan=plan, sends=plan.sends)


# ----------------------------------------------------------------------------- the claim
def _take(this: SyncRound) -> Claim | None:
    """The claim on this run's mirror; None where none can be written, which costs safety nothing.
    Raises Busy.
    """
    setting, folder = this.setting, ClaimFolder(this.setting.directory, CLAIM)
    try:
        return folder.acquire(setting.clock(), CLAIM_SECONDS)
    except ClaimTaken as taken:
        raise Busy(str(taken)) from None
    except OSError as error:
        this.tell(
            f"two at once are not kept apart now: no claim can be written ({error.strerror or error})"
        )
        return None


# ----------------------------------------------------------------------------- the round
def _until_steady(this: SyncRound, rebuild: bool) -> SyncOutcome:
    """Look and send, and again when the hub or a file was changed by someone else meanwhile."""
    setting = this.setting
    for look in range(LOOKS):
        this.state = acquaint(this, head(this, rebuild and look == 0), rebuild and look == 0)
        found = scan(setting.folder, setting.patterns, ROOT_FILES)
        plan = _plan(this, this.state, found)
        this.state = plan.state
        try:
            state = _carry_out(this, plan)
        except (
            HubConflict,
            FileChanged,
            OSError,
        ) as change:  # a file may have gone since it was measured
            this.tell(f"{cause(change)}: looking again")
            continue
        on_record(this, state)
        return _outcome(this, state, found=found, plan=plan, sends=tuple(this.sends))
    raise HubUnavailable(
        f"{setting.repository.name}: it, or the logs, changed {LOOKS} times while they were compared"
    )


class _Plan(Record):
    """What one look found: the files to send, those left alone, and the state with what was learned
    on the way.
    """

    sends: tuple[Send, ...]
    notes: tuple[Note, ...]
    faults: tuple[Note, ...]
    state: SyncState


def _plan(this: SyncRound, state: SyncState, found: Scan) -> _Plan:
    sends, notes, faults = [], list(found.skipped), list(found.faults)
    files, now = dict(state.files), this.setting.clock()
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
                this.setting.folder,
                file,
                remote=remote,
                remote_head=_remote_head(this, state, file),
                running=this.running,
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


def _remote_head(this: SyncRound, state: SyncState, file: LocalFile) -> Callable[[int], bytes]:
    return lambda length: this.setting.hub.read(
        this.setting.repository, file.path, length=length, revision=state.head
    )


def _carry_out(this: SyncRound, plan: _Plan) -> SyncState:
    """Make the commits of a plan; each is on record before the next."""
    state, setting = plan.state, this.setting
    status = _status(this)
    names = [name for send in plan.sends for name in (send.path, send.superseded) if name]
    rules = sync_plan.with_rules(state.attributes, names)
    if rules != state.attributes:  # a commit of its own: the hub decides by the rules that it has
        content = rules.encode("utf-8", "surrogateescape")
        add = Add(sync_plan.FILE_NAME, content)
        state = _commit(
            this,
            state,
            operations=(add,),
            message=f"{sync_plan.FILE_NAME}: logs are large files",
            expected={add.path: len(content)},
        )
        state = on_record(this, replace(state, attributes=rules))
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
        state = _commit(
            this,
            state,
            operations=tuple(operations),
            message=commit_message(batch),
            expected=expected,
            batch=batch,
            progress=progress,
        )
        if is_last and status is not None:
            state = _published(this, state, status)
        state = on_record(this, state)
    age = setting.clock() - state.published_time
    if status is not None and not remaining and is_worth_a_commit(status, state.published, age):
        state = _commit(
            this,
            state,
            operations=(Add(STATUS_FILE, status),),
            message=STATUS_FILE,
            expected={STATUS_FILE: len(status)},
        )
        state = on_record(this, _published(this, state, status))
    return state


def _published(this: SyncRound, state: SyncState, status: bytes) -> SyncState:
    return replace(state, published=material(status), published_time=this.setting.clock())


def _commit(
    this: SyncRound,
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
    setting = this.setting
    made = setting.hub.commit(
        setting.repository, operations, message, parent=state.head, progress=progress
    )
    if made != state.head:
        this.commits.append(made)
        journal(this, made, message, expected)
    known_before = len(this.found)
    remember(this, batch)
    if len(this.found) > known_before:
        found = tuple(this.found.values())
        record(this, lambda: write_found(setting.directory, setting.clock(), found))
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
    this.sends += batch
    this.status_sent |= STATUS_FILE in expected
    return replace(state, head=made, files=files)


def _status(this: SyncRound) -> bytes | None:
    """The status to publish; None where there is none, or where it cannot be made: the logs go all
    the same.
    """
    try:
        return this.setting.status()
    except (OSError, ValueError) as error:
        this.tell(f"{STATUS_FILE} is not published this time: {cause(error)}")
        return None


def _outcome(
    this: SyncRound, state: SyncState, found: Scan, plan: _Plan, sends: tuple[Send, ...]
) -> SyncOutcome:
    ours = [state.files[file.path].remote for file in found.files if file.path in state.files]
    return SyncOutcome(
        repository=this.setting.repository.name,
        sends=sends,
        commits=tuple(this.commits),
        files=len(ours),
        bytes=sum(remote.bytes for remote in ours),
        head=state.head,
        found=tuple(this.found.values()),
        status_sent=this.status_sent,
        notes=plan.notes,
        faults=plan.faults,
    )

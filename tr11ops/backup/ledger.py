"""What the rounds leave for others to read: one file for each archive, and the summary of all.

    state/backup/archives/NAME.json    the last round of one archive: success, fault, rate, re-reading
    state/backup/status.json           for tr11 status and the alerts; made of the records, so it can be made again

The summary's `time` is that of the last success at any archive: absent before the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.observed import replace_json
from tr11ops.rundir.copies import CopyRecord, backup_folder, read_copies
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document, read_record
from trainer.contract.record import Finite, JsonObject, Record

SCHEMA = 1


class ArchiveState(Record):
    """One archive as its last round left it. Times in seconds since the epoch, `rate` in bytes a
    second, read back.

    `success`: when a round last did all that it had to do; `fault`: why the last one did not, "" if
    it did. `reread_round`: when files were last read in turn; `unread`: when the byte that waits
    longest was last read. `listed`: when all receipts and sizes were last looked at; `unseen`:
    places of copies that could not be, then.
    """

    archive: str
    address: str
    time: Finite
    success: Finite | None = None
    fault: str = ""
    rate: Finite | None = None
    reread_round: Finite | None = None
    unread: Finite | None = None
    copies: int = 0
    bytes: int = 0
    listed: Finite | None = None
    unseen: tuple[str, ...] = ()
    schema: int = SCHEMA


def archive_file(directory: RunDirectory, archive: str) -> Path:
    """Where the last round of an archive is on record."""
    return backup_folder(directory) / "archives" / f"{archive}.json"


def read_archive_state(directory: RunDirectory, archive: str) -> ArchiveState | None:
    """The last round of an archive; None where there was none. Raises OSError, ValueError."""
    return read_record(
        ArchiveState, archive_file(directory, archive), "the record of a round", SCHEMA
    )


def last_state(directory: RunDirectory, archive: str) -> ArchiveState | None:
    """As `read_archive_state` for a round that writes the file again: garbage counts as none.
    Raises OSError.
    """
    try:
        return read_archive_state(directory, archive)
    except ValueError:
        return None


def write_archive_state(directory: RunDirectory, state: ArchiveState) -> None:
    """Put a round on record. Raises OSError."""
    replace_json(archive_file(directory, state.archive), document(state), SCHEMA)


# ----------------------------------------------------------------------------- the summary
def damage_line(copy: CopyRecord, others: Iterable[CopyRecord], is_here: bool) -> str:
    """One damaged copy in a line: where, how much, and where the same can still be had."""
    count = len(copy.damaged)
    if count == 1:
        files = copy.damaged[0]
    else:
        files = f"{count} files, e.g. {copy.damaged[0]}"
    sound = sorted({other.archive for other in others if is_same(copy, other) and other.is_whole})
    places = (["the run directory"] if is_here and copy.kind != "data" else []) + [
        f"the {name}" for name in sound
    ]
    if places:
        rest = f"whole in {' and '.join(places)}"
    else:
        rest = "NO OTHER COPY IS KNOWN"
    if copy.kind == "data" and not places:
        rest = "the next round repairs it from the data itself, unless that was changed"
    return f"{copy.archive}: {copy.what}: {files}; {rest}"


def not_finite_line(copy: CopyRecord, others: Iterable[CopyRecord]) -> str:
    """One copy that holds NaN or infinity in a line: where, in which tensor, and what that archive
    has in its stead.
    """
    sound = [other.step for other in others if _serves_as(copy, other)]
    if sound:
        rest = f"the newest sound copy there is of step {max(sound)}"
    else:
        rest = "NO SOUND COPY IS THERE"
    return f"{copy.archive}: {copy.what}: NaN or infinity in {copy.not_finite[0]}; {rest}"


def spoilt(copies: Iterable[CopyRecord]) -> list[CopyRecord]:
    """The whole copies with NaN or infinity that are still the newest of their archive: a later
    sound one is what a restore takes.
    """
    known = list(copies)
    return [
        copy
        for copy in known
        if copy.is_whole
        and copy.not_finite
        and not any(_serves_as(copy, other) and other.step > copy.step for other in known)
    ]


def _serves_as(copy: CopyRecord, other: CopyRecord) -> bool:
    """Whether another copy of the same archive is sound and holds what this one should."""
    return other.is_sound and other.archive == copy.archive and _covers(copy, other)


def _covers(copy: CopyRecord, other: CopyRecord) -> bool:
    """Whether another copy is of a kind that holds all that this one's does."""
    covers = other.kind == "full" or copy.kind != "full"
    return covers and (other.kind == "data") == (copy.kind == "data")


def is_same(copy: CopyRecord, other: CopyRecord) -> bool:
    """Whether another copy holds all that this one does."""
    return (
        _covers(copy, other)
        and other != copy
        and (other.step, other.identity) == (copy.step, copy.identity)
    )


def summary(
    copies: Iterable[CopyRecord], states: Sequence[ArchiveState], here: Mapping[int, str]
) -> JsonObject | None:
    """The content of status.json; None before there is anything to say. `here`: steps that are
    here, by identity.

    A copy of a step that was trained again is no copy of the step that is here now.
    """
    addresses = {state.archive: state.address for state in states if state.address}
    known = [copy for copy in copies if addresses.get(copy.archive, copy.address) == copy.address]
    current = [
        copy
        for copy in known
        if copy.kind != "data"
        and copy.is_sound
        and here.get(copy.step, copy.identity) == copy.identity
    ]
    successes = [state.success for state in states if state.success is not None]
    times = [*successes, *(copy.verified for copy in known)]
    if not times:
        return None
    copied: dict[str, dict[str, list[int]]] = {}
    for copy in sorted(current, key=lambda copy: copy.step):
        copied.setdefault(copy.archive, {}).setdefault(copy.kind, []).append(copy.step)
    faults = [f"{state.archive}: {state.fault}" for state in states if state.fault]
    return {
        "schema": SCHEMA,
        "time": max(times),
        "step": max((copy.step for copy in current), default=None),
        "message": "; ".join(faults),
        "copied": copied,
        "damaged": [
            damage_line(copy, known, copy.kind != "data" and here.get(copy.step) == copy.identity)
            for copy in standing(known)
            if copy.damaged
        ],
        "not_finite": [not_finite_line(copy, known) for copy in spoilt(known)],
    }


def standing(copies: Iterable[CopyRecord]) -> list[CopyRecord]:
    """The copies without those damaged ones that were made again since, beside them in the same
    archive.
    """
    known = list(copies)
    return [
        copy
        for copy in known
        if copy.is_whole
        or not any(
            other.is_whole
            and (other.archive, other.kind, other.step, other.identity)
            == (copy.archive, copy.kind, copy.step, copy.identity)
            for other in known
        )
    ]


def keep_summary(directory: RunDirectory, names: Iterable[str], here: Mapping[int, str]) -> None:
    """Write status.json from what is on record. Raises OSError, ValueError.

    Two archives' rounds may end together: it is looked at again after it was written, until both
    agree.
    """
    archives = list(names)
    before = None
    for _ in range(3):
        states = [
            state
            for state in (last_state(directory, name) for name in archives)
            if state is not None
        ]
        now = summary(read_copies(directory), states, here)
        if now is None or now == before:
            return
        replace_json(backup_folder(directory) / "status.json", now, SCHEMA)
        before = now


def after_round(
    before: ArchiveState | None,
    archive: str,
    address: str,
    now: float,
    copies: Iterable[CopyRecord],
    fault: str,
) -> ArchiveState:
    """An archive's state after a round: what is not known again is kept, unless another archive
    took its place.
    """
    if before is not None and before.address == address:
        kept = before
    else:
        kept = ArchiveState(archive, address, now)
    whole = [copy for copy in copies if copy.is_whole]
    return replace(
        kept,
        time=now,
        success=kept.success if fault else now,
        fault=fault,
        copies=len(whole),
        bytes=sum(copy.bytes for copy in whole),
    )

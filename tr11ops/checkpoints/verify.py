"""Reading every byte of checkpoints, and putting on record what was found. Files are read by
threads: hashing one leaves the interpreter to the others.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from tr11ops.base.errors import StopAsked
from tr11ops.base.units import first_few
from tr11ops.rundir.checkpoint_digests import DigestRecord, digest_of
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
from tr11ops.rundir.copies import identity_of
from trainer.contract.files import host_name
from trainer.contract.manifest import FileEntry, Manifest
from trainer.contract.record import JsonObject, Record

Result = Literal["fine", "bad", "gone", "changed", "nothing to compare", "unread", "stopped"]
# What says nothing of the file: rights, and servers that do not answer. The other errors are what
# damage looks like.
_NOT_ITS_FAULT = {
    errno.EACCES,
    errno.EPERM,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}


class VerifyResult(Record):
    """What reading one checkpoint came to. `bad`: one line for each file; `why`: where it says
    neither fine nor bad.
    """

    step: int
    result: Result
    record: DigestRecord | None = None
    why: str = ""

    @property
    def bad(self) -> tuple[str, ...]:
        if self.record is not None:
            return self.record.bad
        return ()


SHOWN = 3  # tensors that are named


class ValuesFound(Record):
    """What the numbers of one checkpoint are. `not_finite`: part and name of each tensor with NaN
    or infinity.

    `fault`: why it could not be looked at, in one line.
    """

    tensors: int
    not_finite: tuple[tuple[str, str], ...] = ()
    fault: str = ""

    @property
    def is_sound(self) -> bool:
        return not self.not_finite and not self.fault

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors with NaN or infinity, as they go on record."""
        return tuple(f"{part}/{name}" for part, name in self.not_finite)

    def __str__(self) -> str:
        if self.fault:
            return f"numbers could not be looked at: {self.fault}"
        if not self.not_finite:
            return f"numbers finite, {self.tensors} tensors"
        named = first_few((f"{name} ({part})" for part, name in self.not_finite), SHOWN)
        return (
            f"NaN or infinity in {named}: no training goes on well from it; go back to an older one"
        )

    def to_json(self) -> JsonObject:
        return {
            "tensors": self.tensors,
            "not_finite": [{"part": part, "tensor": name} for part, name in self.not_finite],
            "fault": self.fault,
        }


class _Read(Record):
    """One file: what is wrong with it (""), or why that cannot be said."""

    fault: str = ""
    unread: str = ""


def verify(
    row: SavedCheckpoint,
    parallel: int,
    progress: Callable[[int], None],
    stop: threading.Event,
    who: str = "",
) -> VerifyResult:
    """Read a checkpoint that was listed as `row`, `parallel` files at once; `progress` hears of
    bytes as they are read.

    Only what did not change under the reading is called fine or bad.
    """
    place = Path(row.path)
    if row.manifest != "read":
        why = {
            "none": "it has no manifest",
            "foreign": "it has no manifest of this step: another trainer wrote it",
        }
        return VerifyResult(
            row.step, "nothing to compare", why=why.get(row.manifest, "".join(row.faults[:1]))
        )
    try:
        manifest = Manifest.read(place)
        if manifest is not None and identity_of(place) == row.identity:
            found = _read_all(place, manifest, parallel=parallel, progress=progress, stop=stop)
            if identity_of(place) == row.identity:
                return _judged(row, manifest, found, who)
    except StopAsked:
        return VerifyResult(row.step, "stopped")
    except FileNotFoundError:
        return _other(row, place)
    except (OSError, ValueError) as error:
        return VerifyResult(row.step, "unread", why=" ".join(str(error).split()))
    return _other(row, place)


def _read_all(
    place: Path,
    manifest: Manifest,
    parallel: int,
    progress: Callable[[int], None],
    stop: threading.Event,
) -> list[_Read]:
    # the largest must not begin last
    files = sorted(manifest.files, key=lambda entry: -entry.bytes)
    with ThreadPoolExecutor(parallel, thread_name_prefix="verify") as readers:
        try:
            return list(readers.map(lambda entry: _read(place, entry, progress, stop), files))
        except BaseException:
            stop.set()  # else the others are read to their ends first
            raise


def _judged(row: SavedCheckpoint, manifest: Manifest, found: list[_Read], who: str) -> VerifyResult:
    unread = [entry.unread for entry in found if entry.unread]
    bad = tuple(sorted(entry.fault for entry in found if entry.fault))
    if unread and not bad:
        return VerifyResult(row.step, "unread", why=unread[0])
    record = DigestRecord(
        row.step,
        row.identity,
        time=time.time(),
        files=len(manifest.files),
        bytes=manifest.total_bytes,
        bad=bad,
        who=who,
        host=host_name(),
    )
    return VerifyResult(row.step, "bad" if bad else "fine", record, unread[0] if unread else "")


def _other(row: SavedCheckpoint, place: Path) -> VerifyResult:
    if place.is_dir():
        return VerifyResult(row.step, "changed", why="it was replaced by another while it was read")
    return VerifyResult(
        row.step, "gone", why="it got another name or was removed while it was read"
    )


def _read(
    place: Path, entry: FileEntry, progress: Callable[[int], None], stop: threading.Event
) -> _Read:
    """Compare one file. Raises StopAsked, and FileNotFoundError when the whole checkpoint has
    gone.
    """
    if stop.is_set():
        raise StopAsked
    try:
        size, digest, is_still = digest_of(place / entry.path, entry.bytes, progress, stop)
    except FileNotFoundError:
        if not place.is_dir():
            raise
        return _Read(f"{entry.path}: it is missing")
    except (OSError, ValueError) as error:
        why = f"{entry.path}: {getattr(error, 'strerror', None) or error}"
        if getattr(error, "errno", None) in _NOT_ITS_FAULT:
            return _Read(unread=why)
        return _Read(why)
    if not is_still:
        return _Read(unread=f"{entry.path}: it was written to while it was read")
    if size != entry.bytes:
        return _Read(f"{entry.path}: {size} bytes, the manifest says {entry.bytes}")
    return _Read(
        "" if digest == entry.digest else f"{entry.path}: its digest differs from the manifest's"
    )

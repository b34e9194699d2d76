"""What was found when bytes of a checkpoint were last read, or its numbers looked at, no matter who
did it: one small file each, replaced whole.

    state/checkpoints/VARIANT/digests/global_stepN.json
    state/checkpoints/VARIANT/not-finite/global_stepN.IDENTITY8.json    only where a number is NaN or infinite

A record counts only for the checkpoint it was made of: a step that was trained again has another
identity. An identity says which bytes all files have, so what its numbers are counts for each copy
of it too, wherever that lies and wherever they were looked at; reading the bytes again changes
nothing of it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import StopAsked
from tr11ops.base.observed import replace_json
from tr11ops.base.units import counted
from tr11ops.rundir.journal import Journal, user_name
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_formats import WEIGHTS
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.documents import document, read_record
from trainer.contract.files import host_name
from trainer.contract.manifest import Manifest
from trainer.contract.record import Finite, Record

PIECE_BYTES = 4 << 20


SCHEMA = 1
BAD_KEPT = 200


class DigestRecord(Record):
    """One whole reading. `bad`: one line for each file that differs; `time`: its end, seconds since
    the epoch.
    """

    step: int
    identity: str
    time: Finite
    files: int
    bytes: int
    bad: tuple[str, ...] = ()
    who: str = ""
    host: str = ""
    schema: int = SCHEMA

    @property
    def is_fine(self) -> bool:
        return not self.bad


def read_digest(directory: RunDirectory, step: int, identity: str) -> DigestRecord | None:
    """The record of this very checkpoint; None when it was never read whole. Raises OSError or
    ValueError.
    """
    path = directory.paths.digest_record(checkpoint_name(step))
    record = read_record(DigestRecord, path, "a record of digests", SCHEMA)
    if record is not None and identity and record.identity == identity:
        return record
    return None


def write_digest(directory: RunDirectory, record: DigestRecord) -> None:
    """Put a reading on record. Raises OSError."""
    path = directory.paths.digest_record(checkpoint_name(record.step))
    replace_json(path, {**document(record), "bad": record.bad[:BAD_KEPT]}, SCHEMA)


class NotFiniteRecord(Record):
    """Which tensors of one checkpoint hold NaN or infinity, each as PART/NAME; `time`: seconds
    since the epoch.
    """

    step: int
    identity: str
    time: Finite
    not_finite: tuple[str, ...]
    who: str = ""
    host: str = ""
    schema: int = SCHEMA

    def of_copy(self, kind: str) -> tuple[str, ...]:
        """Those that a copy of this kind holds: of one without the optimizer, the weights alone."""
        if kind == "full":
            return self.not_finite
        return tuple(name for name in self.not_finite if name.startswith(f"{WEIGHTS}/"))


def read_not_finite(directory: RunDirectory, step: int, identity: str) -> NotFiniteRecord | None:
    """What is on record of the numbers of this very checkpoint; None when no bad one is known.
    Raises OSError or ValueError.
    """
    path = directory.paths.not_finite_record(checkpoint_name(step), identity)
    if not identity:
        return None
    record = read_record(NotFiniteRecord, path, "a record of numbers", SCHEMA)
    if record is not None and record.identity == identity:
        return record
    return None


def note_numbers(
    directory: RunDirectory,
    step: int,
    identity: str,
    *,
    kind: str = "full",
    not_finite: Sequence[str],
    why: str,
) -> None:
    """Put on record what a look at every number of a checkpoint found, here or in a copy of this
    `kind`; `why` it was looked at. Where all are finite, what was on record of them is gone: a copy
    without the optimizer says nothing of the optimizer's.

    Raises OSError; ValueError where what is on record cannot be read.
    """
    path = directory.paths.not_finite_record(checkpoint_name(step), identity)
    found = tuple(not_finite)
    before = None
    if kind != "full":
        before = read_not_finite(directory, step, identity)
    if before is not None:
        looked_at = before.of_copy(kind)
        found += tuple(name for name in before.not_finite if name not in looked_at)
    if not found:
        path.unlink(missing_ok=True)
        return
    kept = found[:BAD_KEPT]
    record = NotFiniteRecord(step, identity, time.time(), kept, who=user_name(), host=host_name())
    replace_json(path, document(record), SCHEMA)
    if not not_finite:
        return
    text = f"{why}: {checkpoint_name(step)}: NaN or infinity in {not_finite[0]}"
    said = {"step": step, "identity": identity, "not_finite": kept[:20]}
    Journal(directory.journal).write("checkpoint-not-finite", text, said)


def digest_of(
    path: Path, expected: int, progress: Callable[[int], None], stop: threading.Event
) -> tuple[int, str, bool]:
    """Size, SHA-256, and whether the file stayed as it was meanwhile; past what this node remembers
    of it.

    One whose size differs from `expected` is not read: its digest differs too.
    """
    digest, count = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        before = os.fstat(descriptor)
        if stat.S_ISREG(before.st_mode) and before.st_size != expected:
            return before.st_size, "", True
        with suppress(OSError):  # a file system without a cache of pages has nothing to forget
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = memoryview(bytearray(PIECE_BYTES))
        while length := stream.readinto(buffer):
            if stop.is_set():
                raise StopAsked
            digest.update(buffer[:length])
            count += length
            progress(length)
        after = os.fstat(descriptor)
        with suppress(OSError):  # gigabytes that no one needs again would push out what others do
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    is_still = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    return count, digest.hexdigest(), is_still


def put_on_record(directory: RunDirectory, record: DigestRecord, why: str = "") -> None:
    """Keep a reading; damage goes into the journal too. Raises OSError."""
    write_digest(directory, record)
    if record.bad:
        files = counted(len(record.bad), "file differs", "files differ")
        text = f"{checkpoint_name(record.step)}: {files}: {record.bad[0]}"
        said = {"step": record.step, "identity": record.identity, "bad": record.bad[:20]}
        Journal(directory.journal).write(
            "checkpoint-damaged", f"{why}: {text}" if why else text, said
        )


def note_damage(directory: RunDirectory, step: int, identity: str, path: str, why: str) -> bool:
    """A copier or a restore found one file of a checkpoint changed: read it once more, and put it
    on record.

    False when the file is as its manifest says after all, or is not here any more. Raises OSError.
    """
    place = directory.paths.checkpoint(step)
    try:
        manifest = Manifest.read(place)
    except ValueError:
        return False
    if manifest is None:
        entry = None
    else:
        entry = next((entry for entry in manifest.files if entry.path == path), None)
    if manifest is None or entry is None:
        return False
    fault = _fault_of(place / path, entry.bytes, entry.digest)
    if not fault:
        return False
    record = DigestRecord(
        step,
        identity,
        time=time.time(),
        files=len(manifest.files),
        bytes=manifest.total_bytes,
        bad=(f"{path}: {fault}",),
        who=user_name(),
        host=host_name(),
    )
    try:
        before = read_digest(directory, step, identity)
    except ValueError:
        before = None
    if before is not None:
        record = replace(record, bad=tuple(sorted({*before.bad, *record.bad})))
    if before is None or record.bad != before.bad:
        put_on_record(directory, record, why)
    return True


def _fault_of(path: Path, size: int, digest: str) -> str:
    try:
        count, found, is_still = digest_of(path, size, lambda count: None, threading.Event())
    except FileNotFoundError:
        if path.parent.is_dir():
            return "it is missing"
        return ""
    except OSError as error:
        if error.errno == errno.EIO:
            return f"{error.strerror}"
        return ""
    if not is_still or (count, found) == (size, digest):
        return ""
    if count != size:
        return f"{count} bytes, the manifest says {size}"
    return "its digest differs from the manifest's"

"""What was found when all bytes of a checkpoint were last read: one small file each, replaced
whole.

    state/checkpoints/VARIANT/digests/global_stepN.json

A record counts only for the checkpoint it was made of: a step that was trained again has another
identity.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tr11ops.base.errors import DigestStopped
from tr11ops.base.newer import replace_json
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.documents import document, read_record
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
                raise DigestStopped
            digest.update(buffer[:length])
            count += length
            progress(length)
        after = os.fstat(descriptor)
        with suppress(OSError):  # gigabytes that no one needs again would push out what others do
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    is_still = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    return count, digest.hexdigest(), is_still

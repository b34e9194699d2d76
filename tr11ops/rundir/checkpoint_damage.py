"""What was found when bytes of a checkpoint here were read, put on record no matter who read them."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.units import counted
from tr11ops.rundir.checkpoint_digests import DigestRecord, digest_of, read_digest, write_digest
from tr11ops.rundir.journal import Journal, user_name
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.files import host_name
from trainer.contract.manifest import Manifest


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
        time.time(),
        len(manifest.files),
        manifest.total_bytes,
        (f"{path}: {fault}",),
        user_name(),
        host_name(),
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

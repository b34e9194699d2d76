"""What is known of copies: the receipt beside each copy at the destination, and the run directory's
own record of it.

    ARCHIVE/checkpoints/VARIANT/global_stepN/...               a whole checkpoint, file by file
    ARCHIVE/checkpoints-weights/VARIANT/global_stepN/...       its weights alone
    ARCHIVE/checkpoints-spikes-weights/VARIANT/global_stepN/.. the same, of steps named by hand
    ARCHIVE/FOLDER/VARIANT/global_stepN.tar                    instead of the folder, where inodes are scarce
    ARCHIVE/FOLDER/VARIANT/global_stepN.copy.json              the receipt, written last: every digest was read back

    state/backup/copies/ARCHIVE/FOLDER-global_stepN.json       the run's own record, which can be made from the receipt
    state/backup/drill.json                                    the last restore that was tried

A step that was trained again after a roll-back is another checkpoint: `identity` tells them apart,
and its copy lies beside the older one, as global_stepN.IDENTITY8. Nothing of an archive is ever
overwritten or removed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec.structs import replace

from tr11ops.base.observed import replace_json
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.documents import document, read_record
from trainer.contract.record import Count, Finite, Record
from trainer.contract.state_file import content_of

Kind: TypeAlias = Literal["full", "weights", "spike", "data"]
FOLDERS: Mapping[Kind, str] = {
    "full": "checkpoints",
    "weights": "checkpoints-weights",
    "spike": "checkpoints-spikes-weights",
    "data": "data",
}
CHECKPOINT_KINDS: tuple[Kind, ...] = ("full", "weights", "spike")
RECEIPT_SUFFIX = ".copy.json"
SCHEMA = 1


class CopiedFile(Record):
    """One file of a copy: its path in the checkpoint, bytes, SHA-256; in a tar, where its first
    byte is.
    """

    path: str
    bytes: Count
    digest: str
    offset: Count | None = None


class Receipt(Record):
    """The destination's own record of one whole copy. Times in seconds since the epoch."""

    run: str
    variant: str
    step: int
    kind: Kind
    identity: str
    location: str  # of the folder or the tar, relative to the archive
    format: Literal["files", "tar"]
    files: tuple[CopiedFile, ...]
    copied: Finite
    verified: Finite
    host: str = ""
    run_id: str = ""  # see `tr11ops.rundir.paths`; "" in a receipt that is older than ids
    schema: int = SCHEMA

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class CopyRecord(Record):
    """What the run knows of one copy. `verified`: when every byte was read back; `reread`: the last
    re-read's end.

    `damaged` are files that a later reading found changed or missing; a copy with any is no copy.
    `not_finite`: tensors in it that hold NaN or infinity, as `read_copies` finds them on record
    (see `tr11ops.rundir.checkpoint_digests`); such a copy is whole, and serves no one.
    """

    archive: str  # "store" or "url"
    # of the archive, so that another one behind the same key of the card is not taken for it
    address: str
    step: int
    kind: Kind
    identity: str
    location: str
    format: Literal["files", "tar"]
    files: int
    bytes: int
    copied: Finite
    verified: Finite
    reread: Finite | None = None
    damaged: tuple[str, ...] = ()
    schema: int = SCHEMA
    not_finite: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it holds the bytes that were copied."""
        return not self.damaged

    @property
    def is_sound(self) -> bool:
        """Whether someone may go on from it, as far as is known."""
        return self.is_whole and not self.not_finite

    @property
    def fault(self) -> str:
        """What is wrong with it, in words; empty where nothing is."""
        if self.damaged:
            return f"damaged: {self.damaged[0]}"
        if self.not_finite:
            return f"not sound: NaN or infinity in {self.not_finite[0]}"
        return ""

    @property
    def variant(self) -> str:
        """The variant that it was copied from: the second folder of its place."""
        if "/" in self.location:
            return self.location.split("/")[1]
        return ""

    @property
    def what(self) -> str:
        """What it is a copy of, in words."""
        if self.kind == "data":
            return f"data {self.location.rpartition('/')[2]}"
        return f"step {self.step} ({self.kind})"

    @classmethod
    def of(cls, receipt: Receipt, archive: str, address: str) -> CopyRecord:
        """The record of a copy that has this receipt."""
        return cls(
            archive,
            address,
            step=receipt.step,
            kind=receipt.kind,
            identity=receipt.identity,
            location=receipt.location,
            format=receipt.format,
            files=len(receipt.files),
            bytes=receipt.bytes,
            copied=receipt.copied,
            verified=receipt.verified,
        )


def identity_of(folder: Path) -> str:
    """What tells one checkpoint from another of the same step: 64 hex digits.

    Of the manifest's bytes; where there is none (the original's layout), of every file's path, size
    and time. Raises OSError when the folder cannot be read.
    """
    try:
        return hashlib.sha256(content_of(folder / MANIFEST_FILE)).hexdigest()
    except FileNotFoundError:
        lines = []
        for root, _, names in os.walk(folder, onerror=_raise):
            for name in names:
                path = Path(root) / name
                facts = path.stat()
                lines.append(f"{path.relative_to(folder)}\0{facts.st_size}\0{facts.st_mtime_ns}\n")
        return hashlib.sha256("".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()


def _raise(error: OSError) -> None:
    raise error


def read_copies(directory: RunDirectory, every_variant: bool = False) -> tuple[CopyRecord, ...]:
    """The variant's copies on record, by step: those of another variant are of another training.

    Raises OSError or ValueError when one cannot be read: nothing may follow then.
    """
    from tr11ops.rundir.checkpoint_digests import read_not_finite  # no screen needs it

    folder = backup_folder(directory) / "copies"
    found = []
    for path in sorted(folder.glob("*/*.json")):
        copy = read_copy(path)
        if copy is not None and (every_variant or copy.variant == directory.paths.variant):
            its_paths = replace(directory.paths, variant=copy.variant)
            owner = replace(directory, paths=its_paths)
            numbers = read_not_finite(owner, copy.step, copy.identity)
            if numbers is not None:
                copy = replace(copy, not_finite=numbers.of_copy(copy.kind))
            found.append(copy)
    return tuple(sorted(found, key=lambda copy: (copy.step, copy.kind, copy.archive)))


def read_copy(path: Path) -> CopyRecord | None:
    """One record; None when it is not there. Raises OSError, ValueError."""
    return read_record(CopyRecord, path, "a record of a copy", SCHEMA)


def write_copy(directory: RunDirectory, copy: CopyRecord) -> None:
    """Put a copy on record, or replace its record. Raises OSError."""
    path = _path(directory, copy)
    replace_json(path, document(replace(copy, not_finite=())), SCHEMA)


def latest_record(directory: RunDirectory, copy: CopyRecord) -> CopyRecord:
    """A copy's record as it is now: another reader may have found damage since `copy` was read.
    Raises OSError.
    """
    try:
        found = read_copy(_path(directory, copy))
    except ValueError:
        return copy
    is_same = found is not None and (found.address, found.identity, found.copied) == (
        copy.address,
        copy.identity,
        copy.copied,
    )
    if found is not None and is_same:
        return found
    return copy


def _path(directory: RunDirectory, copy: CopyRecord) -> Path:
    name = copy.location.replace("/", "-").removesuffix(".tar")
    return backup_folder(directory) / "copies" / copy.archive / f"{name}.json"


def location_of(kind: Kind, variant: str, step: int, identity: str = "") -> str:
    """Where a copy lies; with `identity` beside another copy of the same step."""
    suffix = ""
    if identity:
        suffix = f".{identity[:8]}"
    return f"{FOLDERS[kind]}/{variant}/{checkpoint_name(step)}{suffix}"


def identity_of_files(folder: Path, files: Iterable[str]) -> str:
    """What tells these files from what they were before. Raises OSError."""
    facts = [(name, (folder / name).stat()) for name in files]
    return digest_of_lines(f"{name}\0{fact.st_size}\0{fact.st_mtime_ns}" for name, fact in facts)


def digest_of_lines(lines: Iterable[str]) -> str:
    """SHA-256 of the lines, in hexadecimal."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


# ----------------------------------------------------------------------------- the drill
class DrillRecord(Record):
    """One restore that was tried: from where, which step, and what came of it."""

    time: Finite
    archive: str
    step: int
    passed: bool
    message: str = ""
    bytes: int = 0
    seconds: Finite = 0.0
    schema: int = SCHEMA


def backup_folder(directory: RunDirectory) -> Path:
    """state/backup."""
    return directory.paths.state / "backup"


def read_drill(directory: RunDirectory) -> DrillRecord | None:
    """The last drill; None where there was none. Raises OSError, ValueError."""
    return read_record(DrillRecord, directory.drill, "the record of a drill", SCHEMA)


def write_drill(directory: RunDirectory, drill: DrillRecord) -> None:
    """Put a drill on record. Raises OSError."""
    replace_json(directory.drill, document(drill), SCHEMA)

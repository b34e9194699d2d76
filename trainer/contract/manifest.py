"""The manifest of a checkpoint: every file's size and digest; written last."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.documents import record_of, write_record
from trainer.contract.errors import NewerFormat
from trainer.contract.record import Count, Finite, JsonObject, Record
from trainer.contract.state_file import read_json

MANIFEST_SCHEMA = 1


STAND_IN = "stand-in"  # in `Manifest.versions` of what a rehearsal saved


DIGEST_ALGORITHM = "sha256"


class FileEntry(Record):
    """One file of a checkpoint: path relative to the checkpoint's folder, bytes, SHA-256 in
    hexadecimal.
    """

    path: str
    bytes: Count
    digest: str


class ForeignFacts(Record):
    """Which other trainer wrote a checkpoint that is held: its dialect, what it calls this one, and
    how it lies there: a folder, a file, or several files. `ranks`: how many wrote it; None where
    that is not known. `weights`: patterns of the names of files that are its weights; none where
    they cannot be told from the rest.
    """

    dialect: str
    name: str
    layout: Literal["folder", "file", "files"]
    ranks: int | None = None
    weights: tuple[str, ...] = ()

    def is_weights(self, path: str) -> bool:
        """Whether a file of the held checkpoint is of its weights, by its own name."""
        name = path.rpartition("/")[2]
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.weights)


class Manifest(Record):
    """What a complete checkpoint says of itself; written last, so its existence means completeness.

    `foreign`: of what trainer it is, where that is not ours; samples and tokens are not known then,
    and 0.
    """

    step: int
    consumed_samples: int
    consumed_tokens: int
    files: tuple[FileEntry, ...]
    topology: Mapping[str, int]
    model: Mapping[str, Any]
    run_card_hash: str
    created: Finite
    versions: Mapping[str, str] = {}
    job_id: str = ""
    foreign: ForeignFacts | None = None
    digest_algorithm: str = DIGEST_ALGORITHM
    schema: int = MANIFEST_SCHEMA

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)

    @property
    def is_rehearsed(self) -> bool:
        """Whether a stand-in of the trainer wrote it, in a rehearsal: it holds no tensors."""
        return STAND_IN in self.versions

    def write(self, folder: Path) -> None:
        """Write the manifest into the checkpoint's folder. Call it when every other file is on
        disk.
        """
        write_record(folder / MANIFEST_FILE, self)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a checkpoint folder; None if it has none (then it is not complete).

        Raises ValueError when the manifest is damaged or of a newer schema.
        """
        try:
            value = read_json(folder / MANIFEST_FILE)
        except OSError as error:
            raise ValueError(f"{folder / MANIFEST_FILE} cannot be read: {error}") from None
        if value is None:
            return None
        return cls.of(value, folder)

    @classmethod
    def of(cls, value: JsonObject, folder: Path) -> Manifest:
        """The manifest of `folder` from its JSON object. Raises ValueError (none), NewerFormat (of
        a newer tr11).
        """
        schema = value.get("schema", 0)
        if not isinstance(schema, int):
            raise ValueError(
                f"{folder / MANIFEST_FILE} is not a manifest: its schema is {schema!r}"
            )
        if schema > MANIFEST_SCHEMA:
            raise NewerFormat(f"{folder} was written by a newer tr11 (manifest schema {schema})")
        try:
            if value["digest_algorithm"] != DIGEST_ALGORITHM:
                raise NewerFormat(
                    f"{folder} has {value['digest_algorithm']!r} digests, this tr11 reads {DIGEST_ALGORITHM}"
                )
            return record_of(cls, value)
        except NewerFormat:
            raise
        except (KeyError, ValueError) as error:
            raise ValueError(f"{folder / MANIFEST_FILE} is not a manifest: {error}") from None


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, as `sha256sum` prints it; read in 4 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(4 << 20):
            digest.update(piece)
    return digest.hexdigest()


def manifest_faults(folder: Path, manifest: Manifest, read_digests: bool) -> list[str]:
    """What is wrong with a checkpoint's files, one line each; empty when all is well.

    Sizes are always compared; digests only when `read_digests` (that reads every byte).
    """
    faults = []
    for entry in manifest.files:
        path = folder / entry.path
        try:
            size = path.stat().st_size
        except OSError as error:
            faults.append(f"{entry.path}: {error.strerror or error}")
            continue
        if size != entry.bytes:
            faults.append(f"{entry.path}: {size} bytes, the manifest says {entry.bytes}")
        elif read_digests and file_digest(path) != entry.digest:
            faults.append(f"{entry.path}: its digest differs from the manifest's")
    return faults

"""What of a checkpoint is copied: its files with their digests, for a whole copy or for one of the
weights alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from msgspec.structs import replace

from tr11ops.backup.base import is_unfinished
from tr11ops.base.errors import CheckpointChanged, CopyError, SourceDamaged
from tr11ops.rundir.checkpoint_scan import walk
from tr11ops.rundir.copies import Kind, identity_of, identity_of_files
from trainer.contract.checkpoint_formats import MANIFEST_FILE, format_of, is_whole
from trainer.contract.documents import document
from trainer.contract.manifest import ForeignFacts, Manifest
from trainer.contract.record import Record
from trainer.contract.resumable import unnamed_files
from trainer.contract.state_file import read_bytes

Content: TypeAlias = bytes  # a field is named `bytes`


class SourceFile(Record):
    """One file to copy. `digest` is None where no manifest says it; `content` is that of a file
    made for the copy.
    """

    path: str
    bytes: int
    digest: str | None
    content: Content | None = None


class CopySource(Record):
    """A checkpoint as it is copied. `files`: all but the manifest, which is None in the original's
    own layout.

    `members`: of data sets, which have no folder of their own, the names that make it up.
    """

    folder: Path
    step: int
    identity: str
    files: tuple[SourceFile, ...]
    manifest: SourceFile | None
    created: float
    members: tuple[str, ...] = ()

    @property
    def all_files(self) -> tuple[SourceFile, ...]:
        """All files, the manifest last."""
        if self.manifest is None:
            return self.files
        return (*self.files, self.manifest)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.all_files)

    def is_unchanged(self) -> bool:
        """Whether the checkpoint is still there and the same, as far as its manifest says."""
        try:
            if self.members:
                return identity_of_files(self.folder, self.members) == self.identity
            return identity_of(self.folder) == self.identity
        except OSError:
            return False


def read_source(folder: Path, step: int, kind: Kind) -> CopySource:
    """What a copy of this kind holds. Reads the manifest alone; sizes of the files are compared
    with it.

    Raises CheckpointChanged when the folder is not there, SourceDamaged when it is not complete or
    names files that are no part of it, CopyError when it cannot be read or holds no weights.
    """
    try:
        identity = identity_of(folder)
        manifest = Manifest.read(folder)
        if manifest is not None:
            content = read_bytes(folder / MANIFEST_FILE)
        else:
            content = b""
    except FileNotFoundError:
        raise CheckpointChanged(f"{folder} is not there") from None
    except OSError as error:
        raise CopyError(f"{folder} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SourceDamaged(" ".join(str(error).split())) from None
    if manifest is None:
        files = tuple(_chosen(_walk(folder), kind))
        _check(folder, files)
        return CopySource(folder, step, identity=identity, files=files, manifest=None, created=0.0)
    if hashlib.sha256(content).hexdigest() != identity:
        raise CheckpointChanged(f"{folder} was replaced while it was looked at")
    if manifest.step != step:
        raise SourceDamaged(
            f"{folder} holds the manifest of step {manifest.step}: it was renamed; give its name back"
        )
    named = [SourceFile(entry.path, entry.bytes, entry.digest) for entry in manifest.files]
    if kind != "full" and manifest.foreign is not None:
        named = _foreign_weights(folder, named, manifest.foreign)
    files = tuple(_chosen(named, kind))
    _check(folder, files)
    if kind == "full":
        files += tuple(_unnamed(folder, manifest))
    if kind != "full":
        content = _manifest_of(manifest, files)
    return CopySource(
        folder,
        step,
        identity=identity,
        files=files,
        manifest=made(MANIFEST_FILE, content),
        created=manifest.created,
    )


def _unnamed(folder: Path, manifest: Manifest) -> Iterator[SourceFile]:
    """Plain files that someone put beside those of the manifest, and that can be read: a whole copy
    holds them too.

    One that cannot be read keeps no checkpoint from its copy; prune leaves a checkpoint that holds
    one alone.
    """
    for path in unnamed_files(manifest, walk(folder).sizes):
        place, parts = folder / path, PurePosixPath(path).parts
        is_text = (
            path.isprintable()
            and "\\" not in path
            and not any(is_unfinished(part) for part in parts)
        )
        if is_text and not place.is_symlink() and place.is_file() and os.access(place, os.R_OK):
            yield SourceFile(path, place.stat().st_size, None)


def _chosen(files: list[SourceFile], kind: Kind) -> Iterator[SourceFile]:
    """All files, or those that evaluation and export need: what `tr11 checkpoints reshape
    --weights-only` keeps.
    """
    form = format_of([file.path for file in files])
    for file in files:
        if kind == "full" or form is None or not form.is_for_resume_alone(file.path):
            yield file


def _foreign_weights(
    folder: Path, files: list[SourceFile], foreign: ForeignFacts
) -> list[SourceFile]:
    """Of what is held of another trainer, the files that its dialect calls weights. Raises CopyError
    where it calls none so.
    """
    found = [file for file in files if foreign.is_weights(file.path)]
    if not found:
        raise CopyError(
            f"{folder} is {foreign.name} of {foreign.dialect}, whose dialect does not say which of its files are "
            "weights (checkpoints.weights): copy it whole"
        )
    return found


def _manifest_of(manifest: Manifest, files: tuple[SourceFile, ...]) -> bytes:
    """The manifest of a copy that holds these files alone."""
    kept = {file.path for file in files}
    entries = tuple(entry for entry in manifest.files if entry.path in kept)
    return (
        json.dumps(
            document(replace(manifest, files=entries)), indent=1, sort_keys=True, default=str
        )
        + "\n"
    ).encode()


def made(path: str, content: bytes) -> SourceFile:
    """A file, or a part of one, that is made for the copy."""
    return SourceFile(path, len(content), hashlib.sha256(content).hexdigest(), content)


def _walk(folder: Path) -> list[SourceFile]:
    """Files of a checkpoint that has no manifest: the original's layout, for ours would not be
    complete.
    """
    found = []
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(root, name)
            found.append(SourceFile(path.relative_to(folder).as_posix(), path.stat().st_size, None))
    if not is_whole([file.path for file in found]):
        raise SourceDamaged(
            f"{folder} has no {MANIFEST_FILE}, so its save did not end; only complete ones are copied"
        )
    return found


def _check(folder: Path, files: tuple[SourceFile, ...]) -> None:
    if not files:
        raise CopyError(f"{folder} holds no weights to copy")
    if len({file.path for file in files}) != len(files):
        raise SourceDamaged(f"{folder / MANIFEST_FILE} names a file twice")
    home, inner = os.path.realpath(folder), {folder}
    for file in files:
        parts = PurePosixPath(file.path).parts
        is_plain = (
            file.path == "/".join(parts) and not file.path.startswith("/") and ".." not in parts
        )
        if not is_plain or "\0" in file.path or "\n" in file.path or file.path == MANIFEST_FILE:
            raise SourceDamaged(
                f"{folder / MANIFEST_FILE} names {file.path!r}, which is no file of a checkpoint"
            )
        if any("\udc80" <= character <= "\udcff" for character in file.path):
            raise SourceDamaged(
                f"{folder} holds {file.path!a}, a name that is no text; give it another name"
            )
        if any(is_unfinished(part) for part in parts):
            raise SourceDamaged(
                f"{folder / file.path} has the name of an unfinished upload; give it another name"
            )
        path = folder / file.path
        try:
            facts = path.lstat()
            if stat.S_ISLNK(facts.st_mode) or path.parent not in inner:
                if os.path.commonpath([home, os.path.realpath(path)]) != home:
                    raise SourceDamaged(
                        f"{path} leads to {os.path.realpath(path)}, out of the checkpoint; copy it in"
                    )
                facts = path.stat()
                inner.add(path.parent)
        except OSError as error:
            gone = file.digest is not None and not (folder / MANIFEST_FILE).exists()
            fault = CheckpointChanged if gone else SourceDamaged
            raise fault(f"{path}: {error.strerror or error}") from None
        if not stat.S_ISREG(facts.st_mode):
            raise SourceDamaged(f"{path} is no plain file")
        if facts.st_size != file.bytes:
            raise SourceDamaged(f"{path}: {facts.st_size} bytes, the manifest says {file.bytes}")

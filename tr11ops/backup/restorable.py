"""Copies that `tr11 backup` did not make: a folder or a tar of a checkpoint, as `gsutil rsync` or
`tar` left it.

Without a receipt no one vouches for the bytes. The manifest in it does, where there is one; else
sizes are all we have.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from tr11ops.backup.base import Archive
from tr11ops.backup.folder import Owner
from tr11ops.backup.ownership import owner_of
from tr11ops.backup.survey import TAR_SUFFIX, list_receipts
from tr11ops.base.errors import CopyError
from tr11ops.base.units import iso_time
from tr11ops.rundir.copies import CHECKPOINT_KINDS, FOLDERS, CopiedFile, Kind, Receipt
from tr11ops.rundir.paths import short
from trainer.contract.checkpoint_formats import MANIFEST_FILE, format_of, is_whole
from trainer.contract.checkpoint_names import checkpoint_name, checkpoint_step
from trainer.contract.documents import record_of
from trainer.contract.manifest import FileEntry
from trainer.contract.record import Record

# Which copies of a step can be restored, and which one is meant: by identity, never by name alone.

LEAST_PREFIX = 4


class Candidate(Record):
    """One copy of a step. `run_id`: of the run that made it, "" where no one says; `is_ours`: of
    this run.
    """

    receipt: Receipt
    run_id: str
    is_ours: bool

    def __str__(self) -> str:
        receipt = self.receipt
        if self.is_ours:
            whose = ""
        else:
            whose = f", of another run (id {short(self.run_id)})"
        return f"{receipt.identity[:8]} ({receipt.kind}, copied {iso_time(receipt.copied)}{whose})"


def candidates(
    archive: Archive, owner: Owner | None, run: str, run_id: str, variant: str
) -> tuple[Candidate, ...]:
    """All copies with a receipt, by step. `owner`: whose archive it is; `run_id`: "" where this run
    has none yet.

    Raises ArchiveError.
    """
    found = []
    for receipt in list_receipts(archive, variant, CHECKPOINT_KINDS):
        maker = receipt.run_id or (
            owner.id if owner is not None and owner.run == receipt.run else ""
        )
        is_other = bool(run_id and maker and maker != run_id)
        found.append(Candidate(receipt, maker, run in ("", receipt.run) and not is_other))
    return tuple(found)


def chosen(
    found: Iterable[Candidate], step: int, kind: Kind | None, identity: str | None
) -> Candidate | None:
    """The copy of a step that is meant: whole before weights, the newest of those. None where there
    is none. Pure.

    Raises CopyError, which lists them, where several checkpoints of the step are there and none
    is named, where the only ones are of another run, and where `identity` (its first digits) fits
    none or several.
    """
    there = [one for one in found if one.receipt.step == step and kind in (None, one.receipt.kind)]
    if identity is not None:
        fitting = [one for one in there if one.receipt.identity.startswith(identity.lower())]
        if len(identity) < LEAST_PREFIX or len({one.receipt.identity for one in fitting}) != 1:
            what = "several checkpoints" if fitting else "no copy"
            raise CopyError(
                f"--identity {identity}: names {what} of step {step}; there is {_listed(there)}"
            )
        return _best(fitting)
    ours = [one for one in there if one.is_ours]
    if not ours and there:
        raise CopyError(
            f"step {step} is there of another run alone: {_listed(there)}; to have it all the same: --identity"
        )
    if len({one.receipt.identity for one in ours}) > 1:
        raise CopyError(
            f"there are several checkpoints of step {step}: {_listed(ours)}; name one: --identity"
        )
    if ours:
        return _best(ours)
    return None


def _best(fitting: Sequence[Candidate]) -> Candidate:
    return max(fitting, key=lambda one: (one.receipt.kind == "full", one.receipt.copied))


def _listed(found: Sequence[Candidate]) -> str:
    return ", ".join(map(str, found)) or "none"


LARGEST_MANIFEST_BYTES = 64 << 20
READ_AHEAD_BYTES = 64 << 10


def restorable(
    archive: Archive,
    variant: str,
    step: int,
    kind: Kind | None = None,
    *,
    run: str = "",
    run_id: str = "",
    identity: str | None = None,
) -> Candidate:
    """What can be restored of a step: a copy of this run's with a receipt (see `chosen`), else what
    lies there without.

    Looked for where `tr11 backup` puts copies, in checkpoints/, at the archive's root, and at the
    root itself. Raises CopyError when there is nothing, or when it cannot be told which is
    meant; ArchiveError.
    """
    owner = owner_of(archive)
    run = run or (owner.run if owner is not None else "")
    found = chosen(
        candidates(archive, owner, run=run, run_id=run_id, variant=variant), step, kind, identity
    )
    if found is not None:
        return found
    name = checkpoint_name(step)
    for folder in (
        [FOLDERS[kind]] if kind is not None else [FOLDERS[kind] for kind in CHECKPOINT_KINDS]
    ):
        for location in (f"{folder}/{variant}/{name}", f"{folder}/{name}", name):
            for suffix in ("", TAR_SUFFIX):
                plain = unreceipted(archive, location + suffix, step, variant)
                if plain is not None:
                    return Candidate(plain, "", is_ours=True)
    raise CopyError(
        f"{archive.address} holds no copy of step {step} of {variant}; see: tr11 backup status"
    )


def unreceipted(archive: Archive, location: str, step: int, variant: str) -> Receipt | None:
    """A receipt made up from what lies at a location, a folder or a tar; None when nothing does.

    Digests are the manifest's, or "" where it names none. Raises CopyError when a file that the
    manifest names is missing or has another size, or when there is no manifest in a copy of our
    layout; ArchiveError.
    """
    if location.endswith(TAR_SUFFIX):
        far = archive.look(location)
        if far is None:
            files = None
        else:
            files = _tar_members(archive, location, far.bytes)
    else:
        files = [
            CopiedFile(file.path[len(location) + 1 :], file.bytes, "")
            for file in archive.list(location)
        ]
    if not files:
        return None
    manifest = next((file for file in files if file.path == MANIFEST_FILE), None)
    paths = [file.path for file in files]
    if manifest is None and not is_whole(paths):
        raise CopyError(
            f"{archive.address}/{location} has no receipt and no {MANIFEST_FILE}: its copy did not end; see: "
            "tr11 backup status"
        )
    digests = {} if manifest is None else _digests(archive, location, manifest, files)
    form = format_of(paths)
    has_optimizer = form is not None and any(map(form.is_for_resume_alone, paths))
    return Receipt(
        run="",
        variant=variant,
        step=checkpoint_step(PurePosixPath(location.removesuffix(TAR_SUFFIX)).name) or step,
        kind="full" if has_optimizer else "weights",
        identity="",
        location=location,
        format="tar" if location.endswith(TAR_SUFFIX) else "files",
        files=tuple(
            CopiedFile(file.path, file.bytes, digests.get(file.path, ""), file.offset)
            for file in files
        ),
        copied=0.0,
        verified=0.0,
    )


def cautions(receipt: Receipt) -> tuple[str, ...]:
    """What a restored copy would not be proved to be, one line each; none for a copy with a
    receipt.
    """
    if receipt.verified:
        return ()
    unknown = sum(1 for file in receipt.files if not file.digest and file.path != MANIFEST_FILE)
    found = [f"{receipt.location} has no receipt: no one read it back when it was copied"]
    if unknown:
        found.append(
            f"{unknown} of {len(receipt.files)} files have no digest: their sizes alone are compared"
        )
    elif all(file.path != MANIFEST_FILE for file in receipt.files):
        found.append(
            f"{receipt.location} has no {MANIFEST_FILE}: whether all files are there is not known"
        )
    return tuple(found)


def _digests(
    archive: Archive, location: str, manifest: CopiedFile, files: list[CopiedFile]
) -> Mapping[str, str]:
    """What the manifest of a copy says of its files, after comparing their sizes."""
    where = f"{archive.address}/{location}/{MANIFEST_FILE}"
    if manifest.bytes > LARGEST_MANIFEST_BYTES:
        raise CopyError(f"{where} is no manifest: it has {manifest.bytes} bytes")
    if manifest.offset is None:
        content = b"".join(archive.read(f"{location}/{MANIFEST_FILE}"))
    else:
        content = b"".join(archive.read(location, manifest.offset, manifest.bytes))
    sizes = {file.path: file.bytes for file in files}
    try:
        entries = record_of(tuple[FileEntry, ...], json.loads(content)["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CopyError(f"{where} is damaged; restore from another copy") from None
    for entry in entries:
        size = sizes.get(entry.path)
        if size != entry.bytes:
            if size is None:
                there = "is missing"
            else:
                there = f"has {size} bytes instead of {entry.bytes}"
            raise CopyError(
                f"{archive.address}/{location}: {entry.path} {there}; restore from another copy"
            )
    return {entry.path: entry.digest for entry in entries}


def _tar_members(archive: Archive, location: str, size: int) -> list[CopiedFile]:
    """Files of a tar with their places; headers alone are read. What is no plain file is left out."""
    stream = io.BufferedReader(_FarStream(archive, location, size), READ_AHEAD_BYTES)
    top = PurePosixPath(location.removesuffix(TAR_SUFFIX)).name
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            return [
                CopiedFile(
                    member.name.removeprefix("./").removeprefix(f"{top}/"),
                    member.size,
                    "",
                    member.offset_data,
                )
                for member in tar
                if member.isreg() and not member.issparse()
            ]
    except tarfile.TarError as error:
        raise CopyError(f"{archive.address}/{location} is no tar, or is cut off: {error}") from None


class _FarStream(io.RawIOBase):
    """One file of an archive, to be read from anywhere."""

    def __init__(self, archive: Archive, path: str, size: int) -> None:
        self._archive = archive
        self._path = path
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), max(0, self._size - self._position))
        if count:
            content = b"".join(self._read(count))
        else:
            content = b""
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _read(self, count: int) -> Iterator[bytes]:
        return self._archive.read(self._path, self._position, count)

"""A copy from an archive back to a folder: read in parallel, compared while it is written, and only
then visible.

    INTO/.global_stepN.partial-MARK/...     what is there so far; another call goes on from it, in mid-file
    INTO/global_stepN                       the checkpoint: every digest was compared, and its manifest read

What a receipt or a tar says is not trusted before it was checked: paths that lead out of the folder
are refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath

from tr11ops.backup.base import Archive
from tr11ops.backup.folder import make_folders, write_at
from tr11ops.backup.round_values import BackupContext
from tr11ops.backup.survey import file_path
from tr11ops.backup.transfer import ByteCounter, SharedTransfer, Transfer, in_threads
from tr11ops.base.errors import AlreadyThere, ArchivePermanentError, CopyDamaged, CopyError
from tr11ops.rundir.checkpoint_digests import DigestRecord, note_damage, put_on_record
from tr11ops.rundir.copies import CopiedFile, Receipt, identity_of
from tr11ops.rundir.journal import user_name
from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.checkpoints import partial_path
from trainer.contract.files import host_name, make_shared, open_shared, sync_folder
from trainer.contract.manifest import Manifest, file_digest, manifest_faults

HASH_BYTES = 4 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST_FILE_BYTES = 1 << 53


def restore_checkpoint(
    archive: Archive,
    receipt: Receipt,
    into: Path,
    transfer: Transfer,
    on_whole: Callable[[], None] = lambda: None,
) -> Path:
    """Restore a copy to `into`/global_stepN and return that folder. A copy that is there already is
    left as it is.

    `on_whole`: called when every byte is known to be right, before the folder has its name: what it
    does is done wherever a restored checkpoint is seen.

    Files whose digest the receipt does not know ("", see `unreceipted`) are compared with their
    size alone.

    Raises CopyError (a hostile receipt, another checkpoint in its place, no room), CopyDamaged,
    CopyStopped, ArchiveError. What was restored is kept, and the next call goes on from there.
    """
    check_receipt(receipt)
    home = into / checkpoint_name(receipt.step)
    try:
        if os.path.lexists(home):
            _require_same(home, receipt, transfer)
            on_whole()
            return home
        make_shared(into)
        partial = partial_path(into, receipt.step, _mark(receipt))
        make_folders(into, partial)
        reader = _Reader(archive, receipt, transfer)
        _require_room(into, receipt, partial)
        with in_threads(transfer.parallel, "restore", reader.abort.set) as begin:
            for file in sorted(receipt.files, key=lambda file: -file.bytes):
                target = partial / file.path
                make_folders(partial, target.parent)
                begin(reader.fetch, file, target.with_name(f".{target.name}.part"), target)
        _check_manifest(partial, receipt)
        for root, _, _ in os.walk(partial):
            sync_folder(Path(root))
        on_whole()
        try:
            partial.rename(home)
        except OSError:
            if not os.path.lexists(home):
                raise
            _require_same(home, receipt, transfer)  # someone else restored it meanwhile
        sync_folder(into)
    except OSError as error:
        raise _of_system(error, into) from None
    return home


def restore_file(
    archive: Archive, receipt: Receipt, path: str, into: Path, transfer: Transfer | None = None
) -> Path:
    """Restore one file of a copy into the folder `into`, under its last name; from a tar, without
    reading the rest.

    Raises as `restore_checkpoint` does; CopyError when the copy has no such file.
    """
    check_receipt(receipt)
    file = next((file for file in receipt.files if file.path == path), None)
    if file is None:
        near = [
            entry.path
            for entry in receipt.files
            if PurePosixPath(entry.path).name == PurePosixPath(path).name
        ]
        hint = ""
        if near:
            hint = f"; there is {near[0]}"
        raise CopyError(f"{archive.address}/{receipt.location} holds no file {path!r}{hint}")
    target = into / PurePosixPath(path).name
    try:
        make_shared(into)
        if os.path.lexists(target):
            if (
                target.is_file()
                and target.stat().st_size == file.bytes
                and file.digest in ("", file_digest(target))
            ):
                return target
            raise CopyError(
                f"{target} is there already, and is another file; move it away or name another folder"
            )
        part = target.with_name(f".{target.name}.{(file.digest or receipt.identity)[:12]}.part")
        _Reader(archive, receipt, transfer or Transfer()).fetch(file, part, target)
    except OSError as error:
        raise _of_system(error, into) from None
    return target


def check_receipt(receipt: Receipt) -> None:
    """Raises CopyError unless everything that a receipt says may be acted upon: it may come from
    a hostile place.
    """
    problem = next(filter(None, (_problem(file, receipt.format) for file in receipt.files)), "")
    paths = [PurePosixPath(file.path).parts for file in receipt.files]
    places = set(paths)
    folders = {parts[:count] for parts in paths for count in range(1, len(parts))}
    if not receipt.files:
        problem = "it names no file"
    elif len(places) != len(paths) or places & folders:
        problem = problem or "it names a file twice"
    elif type(receipt.step) is not int or not 0 <= receipt.step < 10**12:
        problem = problem or "its step is no number"
    elif not _is_inside(receipt.location):
        problem = problem or "its location leads out of the archive"
    if problem:
        raise CopyError(
            f"the receipt of {receipt.location[:200]!r} is not to be trusted: {problem}"
        )


def _problem(file: CopiedFile, format: str) -> str:
    numbers = [file.bytes, *([file.offset] if format == "tar" else [])]
    if not _is_inside(file.path) or file.path != str(PurePosixPath(file.path)):
        return f"{file.path[:100]!r} is no path below a checkpoint"
    if any(type(number) is not int or not 0 <= number < _LARGEST_FILE_BYTES for number in numbers):
        return f"{file.path[:100]!r} has no size or no place"
    if file.digest and not _DIGEST.fullmatch(file.digest):
        return f"{file.path[:100]!r} has no SHA-256"
    return ""


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return (
        bool(parts)
        and not path.startswith("/")
        and ".." not in parts
        and path.isprintable()
        and "\\" not in path
    )


def _mark(receipt: Receipt) -> str:
    """Tells what is half restored from one copy from what is half restored from another."""
    lines = [f"{file.path}\0{file.bytes}\0{file.digest}" for file in receipt.files]
    return hashlib.sha256(
        "\n".join([receipt.identity, *lines]).encode("utf-8", "surrogateescape")
    ).hexdigest()[:12]


def _require_room(into: Path, receipt: Receipt, partial: Path) -> None:
    there = sum(
        os.lstat(Path(root, name)).st_size for root, _, names in os.walk(partial) for name in names
    )
    facts = os.statvfs(into)
    free, missing = facts.f_bavail * facts.f_frsize, receipt.bytes - there
    if missing > free:
        raise CopyError(
            f"{into} has room for {free:,} bytes, and {missing:,} are still to come; make room there"
        )


def _require_same(home: Path, receipt: Receipt, transfer: Transfer) -> None:
    """Raises CopyError unless this very copy lies in `home`, every byte of it."""

    def differs(file: CopiedFile) -> bool:
        transfer.check_stop()
        place = home / file.path
        is_same = (
            place.is_file()
            and place.stat().st_size == file.bytes
            and file.digest in ("", file_digest(place))
        )
        transfer.on_bytes(file.bytes)
        return not is_same

    # it tells most in few bytes
    first = sorted(receipt.files, key=lambda file: file.path != MANIFEST_FILE)
    with ThreadPoolExecutor(transfer.parallel, thread_name_prefix="compare") as threads:
        found = next(
            (file for file, bad in zip(first, threads.map(differs, first), strict=True) if bad),
            None,
        )
    if found is not None:
        raise AlreadyThere(
            f"{home} is there already, and is not this copy ({found.path} differs); nothing was changed. "
            "Restore into another folder, or move it away",
            found.path,
        )


def _check_manifest(folder: Path, receipt: Receipt) -> None:
    """What was restored is what the manifest says, which is of the copy's step. Digests were
    compared on the way.
    """
    try:
        manifest = Manifest.read(folder)
    except ValueError as error:
        raise CopyError(f"what was restored is no checkpoint: {error}") from None
    if manifest is None:
        return
    known = {file.path: file.digest for file in receipt.files}
    faults = manifest_faults(folder, manifest, read_digests=False)
    faults += [
        f"{entry.path}: its digest differs from the manifest's"
        for entry in manifest.files
        if known.get(entry.path) and known[entry.path] != entry.digest
    ]
    if manifest.step != receipt.step:
        faults.insert(0, f"the manifest is that of step {manifest.step}")
    if faults:
        raise CopyError(f"{folder} was restored, but is not what its manifest says: {faults[0]}")


def _of_system(error: OSError, into: Path) -> CopyError:
    what = f"{error.filename or into}: {error.strerror or error}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        what = f"{into}: {error.strerror}; make room and repeat the command: it goes on with what is there"
    return CopyError(what)


class _Reader(SharedTransfer):
    """Fetches files of one copy."""

    def __init__(self, archive: Archive, receipt: Receipt, transfer: Transfer) -> None:
        super().__init__(archive, transfer, "restored")
        self._receipt = receipt

    def fetch(self, file: CopiedFile, part: Path, target: Path) -> None:
        """Have the file at `target`, through `part`. Raises CopyError when what comes is never
        what was copied.
        """
        if target.is_file() and not target.is_symlink():
            # of an earlier call: it is read again, for the disk may have lost it since
            target.replace(part)
        counted = ByteCounter(self.count)
        for _ in range(self.transfer.resends + 1):
            digest = self._fill(file, part, counted)
            if file.digest in ("", digest):
                part.replace(target)
                return
            part.unlink()
            self.transfer.say(
                f"{self._place(file)} did not come as it was copied; it is read again"
            )
        raise self._damaged(file, "other bytes than were copied")

    def _damaged(self, file: CopiedFile, fault: str) -> CopyDamaged:
        return CopyDamaged(
            f"{self._place(file)} is damaged: {fault}. Restore from another copy", file.path, fault
        )

    def _fill(self, file: CopiedFile, part: Path, counted: ByteCounter) -> str:
        """Write what is missing; returns the SHA-256 of the whole."""
        descriptor = open_shared(part, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "r+b", buffering=0) as stream:
            if os.fstat(descriptor).st_size > file.bytes:
                stream.truncate(0)
            digest, done = hashlib.sha256(), 0
            while piece := stream.read(HASH_BYTES):
                self.check()
                digest.update(piece)
                done += len(piece)
                counted.reach(done)

            try:
                for piece in self._pieces(file, done):
                    self.check()
                    self.transfer.reading.take(len(piece))
                    view = memoryview(piece)[: file.bytes - done]
                    digest.update(view)
                    done = write_at(descriptor, view, done)
                    counted.reach(done)
            except ArchivePermanentError:
                if self.archive.look(file_path(self._receipt, file)) is not None:
                    raise
                raise self._damaged(file, "missing") from None
            if done < file.bytes:
                raise self._damaged(file, f"{done} bytes, {file.bytes} were copied")
            # another user's part, which the group may write to already
            with suppress(PermissionError):
                os.fchmod(descriptor, 0o664)
            os.fsync(descriptor)
        return digest.hexdigest()

    def _pieces(self, file: CopiedFile, done: int) -> Iterator[bytes]:
        if done == file.bytes:
            return iter(())
        begin = 0
        if self._receipt.format == "tar":
            begin = file.offset or 0
        return self.archive.read(file_path(self._receipt, file), begin + done, file.bytes - done)

    def _place(self, file: CopiedFile) -> str:
        return f"{self.archive.address}/{self._receipt.location}/{file.path}"


def is_ours(backup: BackupContext, into: Path) -> bool:
    """Whether a folder is where the run's own checkpoints are."""
    return into.resolve() == backup.directory.paths.checkpoints.resolve()


def note_what_is_here(backup: BackupContext, step: int, into: Path, path: str) -> None:
    """A checkpoint here that is not as the copy: on record as damaged, if it is not as its own
    manifest says.
    """
    home = backup.directory.paths.checkpoint(step)
    if is_ours(backup, into):
        with suppress(OSError):  # the refusal says what matters
            note_damage(
                backup.directory,
                step,
                identity=identity_of(home),
                path=path,
                why="found by a restore",
            )


def note_restored(backup: BackupContext, receipt: Receipt, made: Path) -> None:
    """What was restored into the run had every digest compared: that is a reading, and clears one
    that found damage.
    """
    if not (
        is_ours(backup, made.parent)
        and all(file.digest or file.path == MANIFEST_FILE for file in receipt.files)
    ):
        return
    with suppress(OSError):  # then it counts as never read
        put_on_record(
            backup.directory,
            DigestRecord(
                receipt.step,
                identity_of(made),
                time=time.time(),
                files=len(receipt.files),
                bytes=receipt.bytes,
                bad=(),
                who=user_name(),
                host=host_name(),
            ),
        )

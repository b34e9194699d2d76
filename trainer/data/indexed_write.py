"""Writing a `.bin`/`.idx` pair: streamed, locked against a second writer, visible only when whole; in
one life of a process, or in several.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import zlib
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from trainer.contract.errors import DataError, explain_os_errors
from trainer.contract.files import make_shared, open_shared
from trainer.contract.record import Record
from trainer.data.indexed import HEADER, MAGIC, VERSION, bin_path, idx_path, type_code

# Some shared file systems are mounted without locks; there, two writers of one prefix are not told
# apart.
NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


CHECK_BYTES = 8 << 20


class ResumeMark(Record):
    """How much of a half-made pair there is: tokens, sequences and documents, each with its CRC-32."""

    tokens: int = 0
    tokens_crc: int = 0
    sequences: int = 0
    sequences_crc: int = 0
    documents: int = 0
    documents_crc: int = 0


class IndexedWriter:
    """Writes one pair. Use it as a context manager: leaving normally publishes, leaving by an
    exception removes what was not saved.

    Tokens go to hidden `.NAME.bin.partial` beside the target. Publishing flushes both files to disk, takes an old
    index away first and renames the new one last, so that a reader sees the old pair, no pair, or the new pair.
    `begin` may go on from what an earlier writer saved; until it is called, by what is added at the latest, nothing on
    disk changes. `save` brings all up to a mark to disk, with lengths and documents in hidden files beside the tokens;
    what was saved stays when the writer is left by an exception, unless `forget` was called.
    A second writer of the same prefix is refused.
    Raises DataError when the folder cannot be written, the disk is full, or another process is writing the prefix.
    """

    def __init__(self, prefix: Path | str, dtype: npt.DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        self.code = type_code(self.dtype)
        self.mark = ResumeMark()  # behind all that was added
        self._sizes: list[npt.NDArray[np.int32]] = []
        self._documents: list[npt.NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
        # The marks behind each of the last pieces: the saved one, then those that are not saved.
        self._marks = [self.mark]
        self._begun = self._keeps = False
        self._partial_bin = partial_path(bin_path(prefix))
        self._partial_idx = partial_path(idx_path(prefix))
        self._lengths_file, self._documents_file = extra_files(prefix)
        with explain_os_errors("creating", self._partial_bin):
            make_shared(self.prefix.parent)
            self._stream = _open_exclusively(self._partial_bin, self.prefix)

    def begin(self, mark: ResumeMark | None = None) -> bool:
        """Go on behind `mark`; at the beginning where it is None, or where the files do not hold
        what it says.

        Returns whether it goes on. Raises DataError when the files cannot be read or written.
        """
        with explain_os_errors("reading", self._partial_bin):
            goes_on = mark is not None and mark.sequences > 0 and self._holds(mark)
        if goes_on and mark is not None:
            self.mark, self._marks = mark, [mark]
        self._keeps, self._begun = goes_on, True
        with explain_os_errors("writing", self._partial_bin):
            self._cut_to(self.mark)
            self._stream.seek(0, os.SEEK_END)
        if goes_on:
            self._sizes.append(np.fromfile(self._lengths_file, dtype="<i4"))
            self._documents.append(np.fromfile(self._documents_file, dtype="<i8"))
        return goes_on

    def add_sequences(
        self,
        tokens: bytes | npt.NDArray[Any],
        lengths: npt.NDArray[np.int32],
        document_ends: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Append sequences: all their tokens back to back in `dtype`, and each one's length.
        `document_ends` are the numbers of sequences, of these, after which a document ends; None:
        each is a document.
        """
        if document_ends is None:
            document_ends = np.arange(1, len(lengths) + 1)
        if not self._begun:
            self.begin()
        if isinstance(tokens, bytes):
            data = tokens
        else:
            data = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
        count = int(np.sum(lengths, dtype=np.int64))
        if len(data) != count * self.dtype.itemsize:
            raise ValueError(
                f"{len(data)} bytes of tokens for lengths that sum to {count} of {self.dtype}"
            )
        with explain_os_errors("writing", self._partial_bin):
            self._stream.write(data)
        before = self.mark
        sizes = np.asarray(lengths, dtype="<i4")
        ends = np.asarray(document_ends, dtype="<i8") + before.sequences
        self._sizes.append(sizes)
        self._documents.append(ends)
        self.mark = ResumeMark(
            tokens=before.tokens + count,
            tokens_crc=zlib.crc32(data, before.tokens_crc),
            sequences=before.sequences + len(sizes),
            sequences_crc=zlib.crc32(sizes.tobytes(), before.sequences_crc),
            documents=before.documents + len(ends),
            documents_crc=zlib.crc32(ends.tobytes(), before.documents_crc),
        )
        self._marks.append(self.mark)

    def save(self, mark: ResumeMark) -> None:
        """Bring all up to `mark`, of this writer, to disk. Raises DataError; what was saved before
        is then as it was.
        """
        pieces = self._marks.index(mark)
        part = slice(len(self._sizes) - len(self._marks) + 1, None)
        with explain_os_errors("writing", self._partial_bin):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            saved = self._marks[0]
            _write_at(self._lengths_file, 4 * saved.sequences, self._sizes[part][:pieces])
            # The first part is the zero that every list of documents begins with.
            ends = self._documents[1:][part]
            _write_at(self._documents_file, 8 * saved.documents, ends[:pieces])
        self._keeps = True
        del self._marks[:pieces]

    def forget(self) -> None:
        """Keep nothing when the writer is left by an exception."""
        self._keeps = False

    def publish(self) -> None:
        """Make the pair visible. Raises DataError when there is nothing in it."""
        if self.mark.tokens == 0:
            raise DataError(
                f"{self.prefix}: there is not one token to write; check the input and the key of its text"
            )
        with explain_os_errors("writing", self._partial_idx):
            self._write_index()
        with explain_os_errors("publishing", self.prefix):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._partial_bin.chmod(0o664)
            idx_path(self.prefix).unlink(missing_ok=True)
            self._partial_bin.replace(bin_path(self.prefix))
            self._partial_idx.replace(idx_path(self.prefix))
            _sync_folder(self.prefix.parent)
            self._stream.close()

    def _write_index(self) -> None:
        documents = np.concatenate(self._documents)
        with self._partial_idx.open("wb") as stream:
            stream.write(
                HEADER.pack(MAGIC, VERSION, self.code, self.mark.sequences, len(documents))
            )
            for sizes in self._sizes:
                stream.write(sizes.astype("<i4", copy=False).tobytes())
            offset = 0
            for sizes in self._sizes:
                ends = offset + np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
                stream.write(
                    np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes()
                    if len(ends)
                    else b""
                )
                if len(ends):
                    offset = int(ends[-1])
            stream.write(documents.astype("<i8", copy=False).tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        self._partial_idx.chmod(0o664)

    def discard(self) -> None:
        """Take away what was not saved; all, where nothing was. What was there before `begin` is
        not this writer's.
        """
        if not self._begun:
            self._leave_untouched()
        elif not self._keeps:
            for path in (self._partial_bin, self._partial_idx, *extra_files(self.prefix)):
                path.unlink(missing_ok=True)
        # closing flushes, which fails again on a full disk
        with contextlib.suppress(OSError):
            self._stream.close()
        if self._keeps:
            # what stays behind the mark is cut off when the work goes on
            with contextlib.suppress(OSError):
                self._cut_to(self._marks[0])

    def _leave_untouched(self) -> None:
        with contextlib.suppress(OSError):
            others = any(map(os.path.lexists, extra_files(self.prefix)))
            if not others and not self._partial_bin.stat().st_size:
                self._partial_bin.unlink()  # opening made it

    def _parts_of(self, mark: ResumeMark) -> tuple[tuple[Path, int, int], ...]:
        """The files, how long they are at a mark, and the CRC-32 of so much."""
        return (
            (self._partial_bin, mark.tokens * self.dtype.itemsize, mark.tokens_crc),
            (self._lengths_file, 4 * mark.sequences, mark.sequences_crc),
            (self._documents_file, 8 * mark.documents, mark.documents_crc),
        )

    def _cut_to(self, mark: ResumeMark) -> None:
        for path, size, _ in self._parts_of(mark):
            if path.exists():
                os.truncate(path, size)

    def _holds(self, mark: ResumeMark) -> bool:
        try:
            return all(
                path.stat().st_size >= size and _crc_of(path, size) == wanted
                for path, size, wanted in self._parts_of(mark)
            )
        except FileNotFoundError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.publish()
        except BaseException:
            self.discard()
            raise


def partial_path(path: Path) -> Path:
    """Where a file is written before it appears."""
    return path.with_name(f".{path.name}.partial")


def extra_files(prefix: Path | str) -> tuple[Path, Path]:
    """Where a half-made pair has the lengths of its sequences (int32) and the ends of its documents
    (int64).
    """
    return partial_path(Path(f"{prefix}.lengths")), partial_path(Path(f"{prefix}.documents"))


def _open_exclusively(path: Path, prefix: Path) -> IO[bytes]:
    """Open for writing, with what is there, and with a lock that ends with this process.

    Raises DataError when another process has it.
    """
    descriptor = open_shared(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking, the other writer may have renamed this very file to its final
        # name.
        held = path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino
    except BlockingIOError:
        held = False
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            os.close(descriptor)
            raise
        held = True
    if not held:
        os.close(descriptor)
        raise DataError(
            f"another process is writing {prefix}; wait for it, or give another output prefix"
        )
    return os.fdopen(descriptor, "wb", buffering=1 << 20)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc_of(path: Path, size: int) -> int:
    crc = 0
    with path.open("rb") as stream:
        while size and (data := stream.read(min(size, CHECK_BYTES))):
            crc = zlib.crc32(data, crc)
            size -= len(data)
    return crc


def _write_at(path: Path, offset: int, parts: list[npt.NDArray[Any]]) -> None:
    descriptor = open_shared(path, os.O_WRONLY)
    try:
        view = memoryview(b"".join(part.tobytes() for part in parts))
        while view:
            count = os.pwrite(descriptor, view, offset)
            view, offset = view[count:], offset + count
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

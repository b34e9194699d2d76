"""Writing a `.bin`/`.idx` pair: streamed, locked against a second writer, visible only when whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from trainer.contract.errors import DataError
from trainer.contract.sharing import make_shared, open_shared
from trainer.data.errors import explain_os_errors
from trainer.data.indexed import HEADER, MAGIC, VERSION, bin_path, idx_path, type_code

# Some shared file systems are mounted without locks; there, two writers of one prefix are not told
# apart.
NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


class IndexedWriter:
    """Writes one pair. Use it as a context manager: leaving normally publishes, leaving by an
    exception removes.

    Tokens go to hidden `.NAME.bin.partial` beside the target. Publishing flushes both files to disk, takes an old
    index away first and renames the new one last, so that a reader sees the old pair, no pair, or the new pair.
    What a killed writer leaves behind is overwritten by the next one, unless `keep_partial`. A second writer of the
    same prefix is refused.
    Raises DataError when the folder cannot be written, the disk is full, or another process is writing the prefix.
    """

    def __init__(
        self, prefix: Path | str, dtype: npt.DTypeLike, keep_partial: bool = False
    ) -> None:
        self.prefix = Path(prefix)
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        self.code = type_code(self.dtype)
        self._sizes: list[npt.NDArray[np.int32]] = []
        self._documents: list[npt.NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
        self._sequences = 0
        self._document_count = 0
        self.token_count = 0
        self._partial_bin = partial_path(bin_path(prefix))
        self._partial_idx = partial_path(idx_path(prefix))
        with explain_os_errors("creating", self._partial_bin):
            make_shared(self.prefix.parent)
            self._stream = _open_exclusively(self._partial_bin, self.prefix, keep_partial)

    @property
    def sequence_count(self) -> int:
        """Sequences written so far."""
        return self._sequences

    @property
    def document_count(self) -> int:
        """Documents written so far."""
        return self._document_count

    def add_documents(
        self, tokens: bytes | npt.NDArray[Any], lengths: npt.NDArray[np.int32]
    ) -> None:
        """Append documents of one sequence each: all their tokens back to back in `dtype`, and each
        one's length.
        """
        self.add_sequences(tokens, lengths, np.arange(1, len(lengths) + 1, dtype=np.int64))

    def add_sequences(
        self,
        tokens: bytes | npt.NDArray[Any],
        lengths: npt.NDArray[np.int32],
        document_ends: npt.NDArray[np.int64],
    ) -> None:
        """Append sequences; `document_ends` are the numbers of sequences, of these, after which a
        document ends.
        """
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
        self._append_lengths(lengths, document_ends)

    def _append_lengths(
        self, lengths: npt.NDArray[np.int32], document_ends: npt.NDArray[np.int64]
    ) -> None:
        self._sizes.append(np.asarray(lengths, dtype=np.int32))
        self._documents.append(np.asarray(document_ends, dtype=np.int64) + self._sequences)
        self._sequences += len(lengths)
        self._document_count += len(document_ends)
        self.token_count += int(np.sum(lengths, dtype=np.int64))

    def publish(self) -> None:
        """Make the pair visible. Raises DataError when there is nothing in it."""
        if self.token_count == 0:
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
            stream.write(HEADER.pack(MAGIC, VERSION, self.code, self._sequences, len(documents)))
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
        """Take away what was written and not published."""
        self._partial_bin.unlink(missing_ok=True)
        self._partial_idx.unlink(missing_ok=True)
        # closing flushes, which fails again on a full disk; the file is gone anyway
        with contextlib.suppress(OSError):
            self._stream.close()

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


def _open_exclusively(path: Path, prefix: Path, keep: bool) -> IO[bytes]:
    """Open for writing, empty unless what is there is to be kept, with a lock that ends with this
    process.

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
    if not keep:
        os.ftruncate(descriptor, 0)
    return os.fdopen(descriptor, "wb", buffering=1 << 20)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

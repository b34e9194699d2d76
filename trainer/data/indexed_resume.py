"""A pair that is written over several lives of a process: a writer that knows how far what it wrote
is on disk.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract.record import Record
from trainer.contract.sharing import open_shared
from trainer.data.errors import explain_os_errors
from trainer.data.indexed_write import IndexedWriter, partial_path

CHECK_BYTES = 8 << 20


def extra_files(prefix: Path | str) -> tuple[Path, Path]:
    """Where a half-made pair has the lengths of its sequences (int32) and the ends of its documents
    (int64).
    """
    return partial_path(Path(f"{prefix}.lengths")), partial_path(Path(f"{prefix}.documents"))


class ResumeMark(Record):
    """How much of a half-made pair there is: tokens, sequences and documents, each with its CRC-32."""

    tokens: int = 0
    tokens_crc: int = 0
    sequences: int = 0
    sequences_crc: int = 0
    documents: int = 0
    documents_crc: int = 0


class Written(Record):
    """A mark in the life of one writer, and how many pieces it had been given by then."""

    mark: ResumeMark
    pieces: int


class ResumableWriter(IndexedWriter):
    """An IndexedWriter whose half-made pair may be kept, with lengths and documents in hidden files
    beside the tokens.

    Call `begin` first: until it has found whether it can go on, nothing on disk changes, whatever
    ends it. `save` brings all up to a place to disk; what was saved stays when the writer is left
    by an exception, unless `forget` was called.
    """

    def __init__(self, prefix: Path | str, dtype: npt.DTypeLike) -> None:
        super().__init__(prefix, dtype, keep_partial=True)
        self._lengths_file, self._documents_file = extra_files(prefix)
        self._mark = ResumeMark()
        self._saved: Written | None = None
        self._begun = False

    def begin(self, mark: ResumeMark | None) -> bool:
        """Go on behind `mark`; at the beginning where it is None, or where the files do not hold
        what it says.

        Returns whether it goes on. Raises DataError when the files cannot be read or written.
        """
        with explain_os_errors("reading", self._partial_bin):
            is_sound = mark is not None and mark.sequences > 0 and self._holds(mark)
        if not (is_sound and mark is not None):
            mark = ResumeMark()
        if is_sound:
            self._saved = Written(mark, 0)
        else:
            self._saved = None
        self._begun = True
        with explain_os_errors("writing", self._partial_bin):
            for path, size in self._sizes_of(mark):
                os.close(open_shared(path, os.O_WRONLY))
                os.truncate(path, size)
            self._stream.seek(0, os.SEEK_END)
        if is_sound:
            lengths = np.fromfile(self._lengths_file, dtype="<i4")
            self._append_lengths(lengths, np.fromfile(self._documents_file, dtype="<i8"))
            self._mark = mark
            self._saved = Written(mark, len(self._sizes))
        return is_sound

    def add_sequences(
        self,
        tokens: bytes | npt.NDArray[Any],
        lengths: npt.NDArray[np.int32],
        document_ends: npt.NDArray[np.int64],
    ) -> None:
        """As in the base class."""
        if isinstance(tokens, bytes):
            data = tokens
        else:
            data = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
        ends = np.asarray(document_ends, dtype="<i8") + self.sequence_count
        super().add_sequences(data, lengths, document_ends)
        self._mark = ResumeMark(
            self.token_count,
            zlib.crc32(data, self._mark.tokens_crc),
            self.sequence_count,
            sequences_crc=zlib.crc32(
                np.asarray(lengths, dtype="<i4").tobytes(), self._mark.sequences_crc
            ),
            documents=self.document_count,
            documents_crc=zlib.crc32(ends.tobytes(), self._mark.documents_crc),
        )

    def written(self) -> Written:
        """The place behind all that was added."""
        return Written(self._mark, len(self._sizes))

    def save(self, place: Written) -> None:
        """Bring all up to `place` to disk. Raises DataError; what was saved before is then as it
        was.
        """
        saved = self._saved or Written(ResumeMark(), 0)
        with explain_os_errors("writing", self._partial_bin):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            lengths = b"".join(
                part.astype("<i4").tobytes() for part in self._sizes[saved.pieces : place.pieces]
            )
            _write_at(self._lengths_file, 4 * saved.mark.sequences, lengths)
            # The first part is the zero that every list of documents begins with.
            documents = self._documents[saved.pieces + 1 : place.pieces + 1]
            _write_at(
                self._documents_file,
                8 * saved.mark.documents,
                b"".join(part.astype("<i8").tobytes() for part in documents),
            )
        self._saved = place

    def forget(self) -> None:
        """Keep nothing when the writer is left by an exception."""
        self._saved = None

    def discard(self) -> None:
        """Take away what was not saved; all, where nothing was. What was there before `begin` is
        not this writer's.
        """
        if not self._begun:
            self._leave_untouched()
            return
        if self._saved is None:
            super().discard()
            for path in extra_files(self.prefix):
                path.unlink(missing_ok=True)
            return
        with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
            self._stream.close()
        # what stays behind the mark is cut off when the work goes on
        with contextlib.suppress(OSError):
            for path, size in self._sizes_of(self._saved.mark):
                os.truncate(path, size)

    def _leave_untouched(self) -> None:
        with contextlib.suppress(OSError):
            others = any(os.path.lexists(path) for path in extra_files(self.prefix))
            if not others and not self._partial_bin.stat().st_size:
                self._partial_bin.unlink()  # opening made it
        with contextlib.suppress(OSError):
            self._stream.close()

    def _sizes_of(self, mark: ResumeMark) -> tuple[tuple[Path, int], ...]:
        return (
            (self._partial_bin, mark.tokens * self.dtype.itemsize),
            (self._lengths_file, 4 * mark.sequences),
            (self._documents_file, 8 * mark.documents),
        )

    def _holds(self, mark: ResumeMark) -> bool:
        sums = (mark.tokens_crc, mark.sequences_crc, mark.documents_crc)
        try:
            return all(
                path.stat().st_size >= size and _crc_of(path, size) == wanted
                for (path, size), wanted in zip(self._sizes_of(mark), sums, strict=True)
            )
        except FileNotFoundError:
            return False


def _crc_of(path: Path, size: int) -> int:
    crc = 0
    with path.open("rb") as stream:
        while size and (data := stream.read(min(size, CHECK_BYTES))):
            crc = zlib.crc32(data, crc)
            size -= len(data)
    return crc


def _write_at(path: Path, offset: int, data: bytes) -> None:
    descriptor = open_shared(path, os.O_WRONLY)
    try:
        view = memoryview(data)
        while view:
            count = os.pwrite(descriptor, view, offset)
            view, offset = view[count:], offset + count
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

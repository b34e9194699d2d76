"""Files that are on disk when they are closed, and whose digests are known without reading them
back.

Large files bypass the page cache where the file system allows it: the processor then has its time
for the digest, and the pages of the training data stay in memory.
"""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import os
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.contract.files import open_shared, share_folder
from trainer.contract.manifest import FileEntry

# of memory, file offsets and lengths that bypass the page cache
ALIGNMENT = max(4096, mmap.PAGESIZE)
BLOCK_BYTES = 8 << 20
_STAGED_BLOCKS = 4
_COPIERS = 4
_WRITERS = 2  # the disk has the next block at hand when it has finished one
# through the page cache: start writing to disk while the rest is still being produced
_WRITEBACK_BYTES = 32 << 20
_REFUSED_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP}


def aligned_buffer(size: int) -> Tensor:
    """`size` bytes of host memory that begin at a multiple of ALIGNMENT, and are a storage of their
    own.

    Where they are locked, `Tensor.is_pinned` of any view asks about the first byte of the storage,
    and no page is locked that others share.
    """
    whole = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    begin = -whole.data_ptr() % ALIGNMENT
    return torch.from_numpy(whole[begin : begin + size].numpy())


Bytes = Tensor | np.ndarray  # one dimension of uint8; a tensor may be on any device


def as_bytes(data: bytes | bytearray | memoryview) -> Bytes:
    """The same memory as an array."""
    return np.frombuffer(data, dtype=np.uint8)


def copy_bytes(target: Tensor, source: Bytes) -> None:
    """Copy bytes of any device into a CPU tensor of the same length; from a GPU into locked memory
    it is not awaited.

    Within the CPU this is one `memcpy`, two to three times faster on one thread than
    `Tensor.copy_`.
    """
    if isinstance(source, Tensor) and not source.is_cpu:
        target.copy_(source, non_blocking=target.is_pinned())
        # a source that is freed now is not given away before this stream has read it
        if source.is_cuda:
            source.record_stream(torch.cuda.current_stream())
    else:
        np.copyto(target.numpy(), source if isinstance(source, np.ndarray) else source.numpy())


def copy_all(copies: Iterable[tuple[Tensor, Bytes]]) -> None:
    """`copy_bytes` for each (target, source). Threads share what is in host memory: one alone does
    not fill its bus.
    """
    with ThreadPoolExecutor(_COPIERS, thread_name_prefix="checkpoint-copy") as threads:
        begun: list[Future[None]] = []
        for target, source in copies:
            if len(source) <= ALIGNMENT or (isinstance(source, Tensor) and not source.is_cpu):
                copy_bytes(target, source)  # not worth a thread, or on this thread's stream
                continue
            for first in range(0, len(source), BLOCK_BYTES):
                piece = slice(first, first + BLOCK_BYTES)
                begun.append(threads.submit(copy_bytes, target[piece], source[piece]))
        for copy in begun:
            copy.result()


def view_of(block: Tensor) -> memoryview:
    """The memory of a CPU tensor."""
    return block.numpy().data


class BlockFile:
    """A new file, written front to back in blocks that threads write and hash (SHA-256) beside the
    caller.

    Every block but the last has a multiple of ALIGNMENT bytes. Raises OSError, with the file's
    name, as the file system does.
    """

    def __init__(self, path: Path):
        self.path = path
        self._plain = open_shared(path, os.O_WRONLY | os.O_EXCL)
        self._direct = _open_direct(path)
        self._digest = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-digest")
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="checkpoint-write")
        self._unsynced = 0
        self._jobs: list[Future[None]] = []
        self.size = 0
        self.closed = False

    def append(self, block: memoryview) -> list[Future[None]]:
        """Take over the next block; its memory is free again when the returned futures are done."""
        jobs = [
            self._writers.submit(self._write, block, self.size),
            self._hasher.submit(self._digest.update, block),
        ]
        self._jobs += jobs
        self.size += len(block)
        return jobs

    def append_now(self, block: memoryview) -> None:
        """Write and hash within the call, by this thread: for files of a few kilobytes."""
        self._write(block, self.size)
        self._digest.update(block)
        self.size += len(block)

    def close(self) -> None:
        """Wait until all is written, hashed and flushed to disk."""
        try:
            for job in self._jobs:
                job.result()
            with self._naming():
                os.fchmod(self._plain, 0o664)
                os.fsync(self._plain)
        finally:
            self.release()

    def release(self) -> None:
        """Close without flushing; blocks that no thread has begun are dropped."""
        if self.closed:
            return
        self.closed = True
        for threads in (self._writers, self._hasher):
            threads.shutdown(cancel_futures=True)
        os.close(self._plain)
        if self._direct is not None:
            os.close(self._direct)

    def entry(self, path: str) -> FileEntry:
        """Size and digest of what was written, as the manifest's entry for `path`."""
        return FileEntry(path, self.size, self._digest.hexdigest())

    def _write(self, block: memoryview, offset: int) -> None:
        direct = 0
        if self._direct is not None:
            direct = len(block) // ALIGNMENT * ALIGNMENT
        with self._naming():
            if self._direct is not None and direct:
                try:
                    _write_all(self._direct, block[:direct], offset)
                except OSError as error:
                    if error.errno not in _REFUSED_DIRECT:
                        raise
                    # it opens such files but does not write them, or stopped between two pages
                    direct = 0
            _write_all(self._plain, block[direct:], offset + direct)
            # two threads may lose a count: it decides nothing but a moment
            self._unsynced += len(block) - direct
            if self._unsynced >= _WRITEBACK_BYTES:
                self._unsynced = 0
                os.fdatasync(self._plain)

    @contextmanager
    def _naming(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise


def _open_direct(path: Path) -> int | None:
    """A second descriptor of an existing file that bypasses the page cache, or None where that is
    not offered.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno in _REFUSED_DIRECT:
            return None
        raise


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


class DigestingWriter(io.RawIOBase):
    """An append-only binary file over a BlockFile, for data that comes in pieces of any size, also
    from a GPU.

    Pieces are copied into a few aligned blocks, so the caller may reuse its memory at once. Flushed
    to disk and group-writable at `close`. `fault`: the first OSError, which a serializer above may
    hide behind its own error.
    """

    def __init__(self, path: Path):
        super().__init__()
        self._file = BlockFile(path)
        self._blocks: list[tuple[Tensor, list[Future[None]]]] = []
        self._current: Tensor | None = None
        self._filled = 0
        self._size = 0
        self.fault: OSError | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        with memoryview(data) as view:
            self.append(as_bytes(view))
            return view.nbytes

    def append(self, source: Bytes) -> None:
        """Write these bytes."""
        done = 0
        while done < len(source):
            if self._current is not None:
                block = self._current
            else:
                block = self._free_block(len(source) - done)
            self._current = block
            count = min(len(source) - done, len(block) - self._filled)
            copy_bytes(block[self._filled : self._filled + count], source[done : done + count])
            done += count
            self._filled += count
            if self._filled == len(block):
                self._hand_over()
        self._size += len(source)

    def _free_block(self, expected: int) -> Tensor:
        """A block that nothing reads any more; the first of a small file is small."""
        if len(self._blocks) < _STAGED_BLOCKS:
            if self._blocks or expected > ALIGNMENT:
                size = BLOCK_BYTES
            else:
                size = 16 * ALIGNMENT
            return aligned_buffer(size)
        block, jobs = self._blocks.pop(0)
        with self._remembering():
            for job in jobs:
                job.result()
        return block

    def _hand_over(self) -> None:
        assert self._current is not None
        jobs = self._file.append(view_of(self._current[: self._filled]))
        self._blocks.append((self._current, jobs))
        self._current, self._filled = None, 0

    @contextmanager
    def _remembering(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self.fault = self.fault or error
            raise

    def close(self) -> None:
        if self.closed:
            return
        with self._remembering():
            try:
                if self._current is not None and self._filled:
                    last = view_of(self._current[: self._filled])
                    (self._file.append if self._blocks else self._file.append_now)(last)
                self._file.close()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Close without flushing to disk: the file is not wanted any more."""
        if not self.closed:
            self._file.release()
            super().close()

    def entry(self, path: str) -> FileEntry:
        """Size and digest of what was written, as the manifest's entry for `path`."""
        return self._file.entry(path)


@contextmanager
def digesting(path: Path) -> Generator[DigestingWriter]:
    """A DigestingWriter that is closed at the end. Raises the file system's own OSError if that
    made the block fail.
    """
    writer = DigestingWriter(path)
    try:
        yield writer
        writer.close()
    except Exception:
        writer.abandon()
        if writer.fault is not None:
            raise writer.fault from None
        raise


def write_files(contents: Iterable[tuple[Path, Iterable[Bytes]]]) -> list[DigestingWriter]:
    """Write whole files one after the other; flushing one to disk runs beside the writing of the
    next.

    Returns the closed writers, which know sizes and digests. Raises OSError; all files are then
    closed.
    """
    writers: list[DigestingWriter] = []
    try:
        with ThreadPoolExecutor(4, thread_name_prefix="checkpoint-sync") as flushing:
            closed: list[Future[None]] = []
            for path, pieces in contents:
                writer = DigestingWriter(path)
                writers.append(writer)
                for piece in pieces:
                    writer.append(piece)
                closed.append(flushing.submit(writer.close))
        for one in closed:
            one.result()
    except BaseException:
        for writer in writers:
            writer.abandon()
        raise
    return writers


def make_folder(path: Path) -> None:
    """Create one folder, group-writable. Raises OSError, also when it exists."""
    path.mkdir(parents=False)
    share_folder(path)

"""Files that are on disk when they are closed, and whose digests are known without reading them back."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from trainer.contract import FileEntry

_WRITEBACK_BYTES = 32 << 20  # start writing to disk while the rest is still being produced
_PARALLEL_BYTES = 256 << 10  # below this, handing the hash to a thread costs more than it saves


class DigestingWriter(io.RawIOBase):
    """An append-only binary file. Hashes (SHA-256) while it writes; flushed to disk, group-writable at `close`.

    Hashing and writing-back run beside the writes in one thread each: both release the interpreter's lock.
    Raises OSError as the file system does.
    """

    def __init__(self, path: Path):
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
        self._path = path
        self.fault: OSError | None = None
        self._digest = hashlib.sha256()
        self._size = 0
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-digest")
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-sync")
        self._writeback: Future[None] | None = None
        self._synced = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        if len(view) < _PARALLEL_BYTES:
            self._digest.update(view)
            self._append(view)
        else:
            # The caller may reuse the memory after this call, so the hash has to end within it.
            hashed = self._hasher.submit(self._digest.update, view)
            try:
                self._append(view)
            finally:
                hashed.result()
        self._size += len(view)
        self._start_writeback()
        return len(view)

    def _append(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            with self._remembering():
                done += os.write(self._descriptor, view[done : done + (1 << 30)])

    def _start_writeback(self) -> None:
        if self._size - self._synced < _WRITEBACK_BYTES:
            return
        if self._writeback is not None:
            if not self._writeback.done():
                return
            with self._remembering():
                self._writeback.result()
        self._writeback = self._syncer.submit(os.fdatasync, self._descriptor)
        self._synced = self._size

    @contextmanager
    def _remembering(self) -> Generator[None]:
        """Keep the first OSError, with the file's name: a serializer above may hide it behind an error of its own."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            self.fault = self.fault or error
            raise

    def close(self) -> None:
        if self.closed:
            return
        try:
            with self._remembering():
                if self._writeback is not None:
                    self._writeback.result()
                os.fchmod(self._descriptor, 0o664)
                os.fsync(self._descriptor)
        finally:
            self._release()

    def abandon(self) -> None:
        """Close without flushing to disk: the file is not wanted any more."""
        if not self.closed:
            self._release()

    def _release(self) -> None:
        self._hasher.shutdown()
        self._syncer.shutdown()
        os.close(self._descriptor)
        super().close()

    def entry(self, path: str) -> FileEntry:
        """Size and digest of what was written, as the manifest's entry for `path`."""
        return FileEntry(path, self._size, self._digest.hexdigest())


@contextmanager
def digesting(path: Path) -> Generator[DigestingWriter]:
    """A DigestingWriter that is closed at the end. Raises the file system's own OSError if that made the block fail."""
    writer = DigestingWriter(path)
    try:
        yield writer
        writer.close()
    except Exception:
        writer.abandon()
        if writer.fault is not None:
            raise writer.fault from None
        raise


def make_folder(path: Path) -> None:
    """Create one folder, group-writable. Raises OSError, also when it exists."""
    path.mkdir(parents=False)
    path.chmod(path.stat().st_mode | 0o070)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk, so that names survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""An archive whose every request is tried again while it is unavailable: the one place that applies
the policy.

Only the sending of a file is not: anyone who sends begins an `upload` again, which goes on where
the last one was cut off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from tr11ops.backup.base import Archive, RemoteFile, Unread, Upload
from tr11ops.backup.transfer import Transfer
from tr11ops.base.errors import ArchiveUnavailable, CopyStopped
from tr11ops.base.retry import RetryPolicy, retry

T = TypeVar("T")


def retried(
    archive: Archive, transfer: Transfer, check: Callable[[], object] | None = None
) -> RetriedArchive:
    """The archive with the policy of a transfer, in place of another one. `check` raises to give up
    sooner.
    """
    inner = archive.inner if isinstance(archive, RetriedArchive) else archive
    wait = partial(transfer.wait, check=check)
    return RetriedArchive(inner, replace(transfer.retries, sleep=wait, say=transfer.say))


class SharedTransfer:
    """What threads that move the files of one checkpoint share. `undone`: what the first failure
    keeps the others from.

    Its methods may be called by many threads at once.
    """

    def __init__(self, archive: Archive, transfer: Transfer, undone: str) -> None:
        self.archive = retried(archive, transfer, self.check)
        self.transfer = transfer
        self.abort = threading.Event()  # has all threads end soon: one of them failed
        self._undone = undone
        self._counting = threading.Lock()

    def check(self) -> None:
        """Raise CopyStopped when a stop was asked for, or one of the threads failed."""
        self.transfer.check_stop()
        if self.abort.is_set():
            raise CopyStopped(f"another file of the checkpoint could not be {self._undone}")

    def count(self, count: int) -> None:
        """Tell of bytes, one thread at a time."""
        with self._counting:
            self.transfer.on_bytes(count)


class RetriedArchive:
    """An `Archive` in front of another. Raises ArchiveUnavailable when it gives up, and what the
    waiting raises.
    """

    def __init__(self, inner: Archive, policy: RetryPolicy) -> None:
        self.inner = inner
        self.name, self.address, self.renames = inner.name, inner.address, inner.renames
        self._policy = policy

    def look(self, path: str) -> RemoteFile | None:
        return self.retry(lambda: self.inner.look(path))

    def list(self, folder: str, unread: Unread | None = None) -> Iterator[RemoteFile]:
        yield from self.retry(lambda: tuple(self.inner.list(folder, unread)))

    def upload(self, path: str, size: int, identity: str) -> Upload:
        return self.retry(lambda: self.inner.upload(path, size, identity))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """What was cut off goes on at the byte where it ended."""
        done, pieces = 0, self.inner.read(path, offset, length)

        def following() -> bytes | None:
            nonlocal pieces
            try:
                return next(pieces, None)
            except BaseException:
                pieces = self.inner.read(
                    path, offset + done, None if length is None else length - done
                )
                raise

        while (piece := self.retry(following)) is not None:
            done += len(piece)
            yield piece

    def put(self, path: str, content: bytes) -> None:
        self.retry(lambda: self.inner.put(path, content))

    def move(self, path: str, to: str) -> None:
        self.retry(lambda: self.inner.move(path, to))

    def free_bytes(self) -> int | None:
        return self.retry(self.inner.free_bytes)

    def sweep(self, older_than: float) -> int:
        return self.retry(lambda: self.inner.sweep(older_than))

    def close(self) -> None:
        self.inner.close()

    def retry(self, action: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """Anything made of several requests, begun again as a whole."""
        return retry(action, self._policy, ArchiveUnavailable, progress=progress)

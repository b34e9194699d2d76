"""How bytes are moved between a checkpoint and an archive, and tried again: what a copy, a re-read
and a restore share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec import field
from msgspec.structs import replace

from tr11ops.backup.base import ARCHIVE_RETRIES, Archive, Pieces, RemoteFile, Unread
from tr11ops.base.errors import ArchiveUnavailable, CopyStopped
from tr11ops.base.retry import RetryPolicy, retry
from tr11ops.runcard.watching import BackupSection
from trainer.contract.record import Record

# A bandwidth limit that many threads share.

BURST_SECONDS = 0.25  # of the rate, that may go at once after a pause


@dataclass
class RateLimiter:
    """A token bucket: in any time, at most rate x (time + BURST_SECONDS) bytes pass, and one piece.

    `bytes_per_second` 0: no limit. Measures with a monotonic clock, so a clock that is set changes
    nothing.
    """

    bytes_per_second: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        # when all that was taken so far would be through at the rate
        self._due = self.clock() - BURST_SECONDS

    def take(self, count: int) -> None:
        """Wait until `count` bytes may go. Threads go in the order in which they ask."""
        if not self.bytes_per_second or not count:
            return
        with self._lock:
            now = self.clock()
            begin = max(self._due, now - BURST_SECONDS)
            self._due = begin + count / self.bytes_per_second
            wait = begin - now
        if wait > 0:
            self.sleep(wait)


PIECE_BYTES = 1 << 20
SMALLEST_PIECE_BYTES = 64 << 10
LONGEST_NAP_SECONDS = 0.5  # between two looks whether to go on


class ByteCounter:
    """How far one pass over a file came; tells of each byte once, also where a second try goes over
    it again.
    """

    def __init__(self, on_bytes: Callable[[int], None] | None) -> None:
        self._on_bytes = on_bytes
        self.reached = 0

    def reach(self, position: int) -> None:
        if position > self.reached:
            if self._on_bytes is not None:
                self._on_bytes(position - self.reached)
            self.reached = position


@contextmanager
def in_threads(count: int, name: str, abort: Callable[[], None]) -> Iterator[Callable[..., None]]:
    """Gives what begins a piece of work in one of `count` threads, and waits at its end for all of
    them.

    The first error calls `abort`, which is to end the others soon, and is raised when they have
    ended.
    """
    begun: list[Future[None]] = []
    with ThreadPoolExecutor(count, thread_name_prefix=name) as threads:
        try:
            yield lambda work, *given: begun.append(threads.submit(work, *given))
            wait(begun, return_when=FIRST_EXCEPTION)
        finally:
            if any(not future.done() or future.exception() is not None for future in begun):
                abort()
                for future in begun:
                    future.cancel()
    errors = [
        error
        for future in begun
        if not future.cancelled() and (error := future.exception()) is not None
    ]
    if errors:
        raise next((error for error in errors if not isinstance(error, CopyStopped)), errors[0])


def _nothing(count: int) -> None:
    """No one watches the progress."""


def _silence(text: str) -> None:
    """No one listens."""


class Transfer(Record):
    """The settings. `sending` and `reading` limit what all files together send and read back, each
    way.

    `on_bytes` is told of each byte twice in a copy: when it was sent (or found sent), and when it
    was read back. It is called from many threads, one at a time. `stop`: set it, and everything
    ends soon with CopyStopped. `say`: one line for a person about a failure that is tried again.
    `resends`: how often a file that came back changed is sent again.
    """

    parallel: int = 8
    sending: RateLimiter = field(default_factory=lambda: RateLimiter(0))
    reading: RateLimiter = field(default_factory=lambda: RateLimiter(0))
    retries: RetryPolicy = ARCHIVE_RETRIES
    on_bytes: Callable[[int], None] = _nothing
    say: Callable[[str], None] = _silence
    stop: threading.Event = field(default_factory=threading.Event)
    piece_bytes: int = PIECE_BYTES
    resends: int = 2

    @classmethod
    def of(
        cls,
        section: BackupSection,
        *,
        on_bytes: Callable[[int], None] = _nothing,
        say: Callable[[str], None] = _silence,
        stop: threading.Event | None = None,
    ) -> Transfer:
        """The settings of a card."""
        stop = stop or threading.Event()
        rate = section.megabytes_per_second * 1e6
        if not rate:
            piece = PIECE_BYTES
        else:
            piece = min(PIECE_BYTES, max(SMALLEST_PIECE_BYTES, int(rate / 4)))
        return cls(
            parallel=section.parallel,
            sending=RateLimiter(rate, sleep=stop.wait),
            reading=RateLimiter(rate, sleep=stop.wait),
            on_bytes=on_bytes,
            say=say,
            stop=stop,
            piece_bytes=piece,
        )

    def check_stop(self) -> None:
        """Raise CopyStopped when a stop was asked for."""
        if self.stop.is_set():
            raise CopyStopped("stopped on request; the next copy goes on from here")

    def wait(self, seconds: float, check: Callable[[], object] | None = None) -> None:
        """Sleep; raise CopyStopped as soon as a stop is asked for, or what `check` raises, soon
        after it would.
        """
        until = time.monotonic() + seconds
        while True:
            self.check_stop()
            if check is not None:
                check()
            left = until - time.monotonic()
            if left <= 0:
                return
            self.stop.wait(left if check is None else min(left, LONGEST_NAP_SECONDS))


# An archive whose every request is tried again while it is unavailable: the one place that applies
# the policy.

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

    def upload(self, path: str, size: int, identity: str, pieces: Pieces) -> None:
        """What was cut off goes on where it ended; a try that got further is no failure."""
        reached = 0

        def watched(offset: int) -> Iterator[bytes]:
            nonlocal reached
            for piece in pieces(offset):
                yield piece
                offset += len(piece)
                reached = max(reached, offset)

        self.retry(lambda: self.inner.upload(path, size, identity, watched), lambda: reached)

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

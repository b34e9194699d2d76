"""An archive whose every request is tried again while it is away: the one place where the retry policy is applied.

Only the sending of a file is not: whoever sends begins an `upload` again, which goes on where the last one was cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tr11ops.backup.base import Archive, FarFile, Unread, Upload
from tr11ops.backup.retrying import Retrying, T, persist

Wait = Callable[[float], object]
Say = Callable[[str], None]


def patient(archive: Archive, retrying: Retrying, wait: Wait, say: Say) -> PatientArchive:
    """The archive with this policy, in place of another that it may have. `wait` and `say` are those of `persist`."""
    return PatientArchive(archive.inner if isinstance(archive, PatientArchive) else archive, retrying, wait, say)


class PatientArchive:
    """An `Archive` in front of another. Raises StillAway when its tries are used up, and whatever `wait` raises."""

    def __init__(self, inner: Archive, retrying: Retrying, wait: Wait, say: Say) -> None:
        self.inner = inner
        self.name, self.address, self.renames = inner.name, inner.address, inner.renames
        self._retrying, self._wait, self._say = retrying, wait, say

    def look(self, path: str) -> FarFile | None:
        return self.persist(lambda: self.inner.look(path))

    def list(self, folder: str, unread: Unread | None = None) -> Iterator[FarFile]:
        yield from self.persist(lambda: tuple(self.inner.list(folder, unread)))

    def upload(self, path: str, size: int, identity: str) -> Upload:
        return self.persist(lambda: self.inner.upload(path, size, identity))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """What was cut off goes on at the byte where it ended."""
        done, pieces = 0, self.inner.read(path, offset, length)

        def following() -> bytes | None:
            nonlocal pieces
            try:
                return next(pieces, None)
            except BaseException:
                pieces = self.inner.read(path, offset + done, None if length is None else length - done)
                raise

        while (piece := self.persist(following)) is not None:
            done += len(piece)
            yield piece

    def put(self, path: str, content: bytes) -> None:
        self.persist(lambda: self.inner.put(path, content))

    def move(self, path: str, to: str) -> None:
        self.persist(lambda: self.inner.move(path, to))

    def free_bytes(self) -> int | None:
        return self.persist(self.inner.free_bytes)

    def sweep(self, older_than: float) -> int:
        return self.persist(lambda: self.inner.sweep(older_than))

    def close(self) -> None:
        self.inner.close()

    def persist(self, action: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """Anything made of several requests, begun again as a whole."""
        return persist(action, self._retrying, self._wait, self._say, progress)

"""A file on its way into a bucket of Google's: in one request, or through a session in many."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tr11ops.backup.remote_http import BucketAnswer, Exchange
from tr11ops.backup.remote_sessions import UploadSession
from tr11ops.base.errors import ArchiveUnavailable

if TYPE_CHECKING:
    from tr11ops.backup.remote_gcs import GcsArchive

PERSISTED = re.compile(r"bytes=0-(\d{1,18})")  # what the server has of a file


class SmallUpload:
    """A file that goes in one request."""

    def __init__(self, archive: GcsArchive, path: str, size: int) -> None:
        self.offset = 0
        self._archive = archive
        self._path = path
        self._size = size
        self._content = bytearray()

    def write(self, piece: bytes) -> None:
        self._content += piece

    def finish(self) -> None:
        if len(self._content) != self._size:
            raise ValueError(
                f"{self._path}: {len(self._content)} bytes were written, {self._size} announced"
            )
        self._archive.put(self._path, bytes(self._content))

    def leave(self) -> None:
        self._content.clear()


class SessionUpload:
    """A file that goes through an upload session. Its last byte is held back until `finish`."""

    def __init__(self, archive: GcsArchive, path: str, session: UploadSession, offset: int) -> None:
        self.offset = offset
        self._archive = archive
        self._path = path
        self._session = session
        self._sent = offset
        self._end = offset  # of the request that is on its way
        self._request: Exchange | None = None
        self._last = b""
        self._was_finished = offset == session.size

    def write(self, piece: bytes) -> None:
        view = memoryview(piece)
        room = self._session.size - 1 - self._sent
        if len(view) > room:
            if len(view) > room + 1 or self._last:
                raise ValueError(
                    f"{self._path}: more than the {self._session.size} bytes that were announced"
                )
            view, self._last = view[:room], bytes(view[room:])
        self._send(view)

    def finish(self) -> None:
        if self._was_finished:
            return
        if self._sent + len(self._last) != self._session.size:
            raise ValueError(
                f"{self._path}: fewer than the {self._session.size} bytes that were announced"
            )
        self._send(memoryview(self._last))

    def leave(self) -> None:
        if self._request is not None:
            self._request.abandon()
            self._request = None

    def _send(self, view: memoryview) -> None:
        size = self._session.size
        while view:
            if self._request is None:
                self._end = self._archive.request_end(self._sent, size)
                self._request = self._archive.begin_request(self._session, self._sent, self._end)
            count = min(len(view), self._end - self._sent)
            self._request.send(view[:count])
            self._sent += count
            view = view[count:]
            if self._sent == self._end or self._request.was_answered:
                self._heard(self._request.finish())

    def _heard(self, answer: BucketAnswer) -> None:
        self._request = None
        if self._sent == self._session.size:
            self._archive.finished(self._session, self._path, answer)
            return
        if answer.status != 308:
            raise self._archive.refused(self._session, self._path, answer)
        match = PERSISTED.fullmatch(answer.headers.get("Range", ""))
        if match is None or int(match[1]) + 1 < self._end:
            raise ArchiveUnavailable(
                f"{self._archive.address}/{self._path}: the server took only a part of what was sent"
            )

"""A file on its way into a bucket of Google's: in one request, or through a session in many, which
is remembered.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.backup.remote_http import BucketAnswer, Exchange
from tr11ops.base.errors import ArchiveUnavailable
from tr11ops.base.private_file import private_text
from trainer.contract.documents import document, record_of_text
from trainer.contract.files import write_atomically
from trainer.contract.record import Finite, Record

if TYPE_CHECKING:
    from tr11ops.backup.remote_gcs import GcsArchive


# Where this user's unfinished uploads are remembered, so that one that was killed goes on in
# mid-file.
#
#     ~/.local/state/tr11/uploads/KEY.json       ($XDG_STATE_HOME/tr11/uploads where that is set)
#
# Anyone who knows the address of an upload session can write to it: it is a secret, readable by its
# user alone, and never in a run directory. Losing one costs sending that file again, no more.


class UploadSession(Record):
    """One upload that was begun: `target` is the session's path and query at the server. Times
    since the epoch.
    """

    server: str
    bucket: str
    name: str
    size: int
    identity: str
    target: str
    begun: Finite

    @property
    def key(self) -> str:
        return session_key(
            self.server, self.bucket, name=self.name, size=self.size, identity=self.identity
        )


def session_key(server: str, bucket: str, name: str, size: int, identity: str) -> str:
    """What an upload is found again by."""
    return hashlib.sha256(
        "\0".join((server, bucket, name, str(size), identity)).encode("utf-8")
    ).hexdigest()[:40]


def sessions_folder(environment: Mapping[str, str]) -> Path:
    """Where a user's sessions are kept."""
    state = environment.get("XDG_STATE_HOME") or str(
        Path(environment.get("HOME") or Path.home()) / ".local" / "state"
    )
    return Path(state) / "tr11" / "uploads"


class UploadSessions:
    """The sessions in a folder. Nothing here fails: where the folder cannot be used, uploads begin
    again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> UploadSession | None:
        """A session that was kept; None when there is none, or none that this user alone could
        write.
        """
        return _read(self._path(key))

    def keep(self, session: UploadSession) -> None:
        """Keep a session, replacing an older one of the same upload."""
        # a home that is full or read-only costs the resumption, not the upload
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._path(session.key), json.dumps(document(session)), 0o600)

    def forget(self, key: str) -> None:
        """Forget a session: it has ended."""
        with suppress(OSError):
            self._path(key).unlink()

    def __iter__(self) -> Iterator[UploadSession]:
        with suppress(OSError):
            for path in sorted(self._folder.glob("*.json")):
                session = _read(path)
                if session is not None:
                    yield session

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def _read(path: Path) -> UploadSession | None:
    try:
        session = record_of_text(UploadSession, private_text(path))
    except ValueError:
        return None
    if session.target.startswith("/") and session.key == path.stem:
        return session
    return None


PERSISTED = re.compile(r"bytes=0-(\d{1,18})")  # what the server has of a file


@dataclass
class SmallUpload:
    """A file that goes in one request."""

    archive: GcsArchive
    path: str
    size: int

    def __post_init__(self) -> None:
        self.offset = 0
        self._content = bytearray()

    def write(self, piece: bytes) -> None:
        self._content += piece

    def finish(self) -> None:
        if len(self._content) != self.size:
            raise ValueError(
                f"{self.path}: {len(self._content)} bytes were written, {self.size} announced"
            )
        self.archive.put(self.path, bytes(self._content))

    def leave(self) -> None:
        self._content.clear()


@dataclass
class SessionUpload:
    """A file that goes through an upload session. Its last byte is held back until `finish`."""

    archive: GcsArchive
    path: str
    session: UploadSession
    offset: int

    def __post_init__(self) -> None:
        self._sent = self.offset
        self._end = self.offset  # of the request that is on its way
        self._request: Exchange | None = None
        self._last = b""
        self._was_finished = self.offset == self.session.size

    def write(self, piece: bytes) -> None:
        view = memoryview(piece)
        room = self.session.size - 1 - self._sent
        if len(view) > room:
            if len(view) > room + 1 or self._last:
                raise ValueError(
                    f"{self.path}: more than the {self.session.size} bytes that were announced"
                )
            view, self._last = view[:room], bytes(view[room:])
        self._send(view)

    def finish(self) -> None:
        if self._was_finished:
            return
        if self._sent + len(self._last) != self.session.size:
            raise ValueError(
                f"{self.path}: fewer than the {self.session.size} bytes that were announced"
            )
        self._send(memoryview(self._last))

    def leave(self) -> None:
        if self._request is not None:
            self._request.abandon()
            self._request = None

    def _send(self, view: memoryview) -> None:
        size = self.session.size
        while view:
            if self._request is None:
                self._end = self.archive.request_end(self._sent, size)
                self._request = self.archive.begin_request(self.session, self._sent, self._end)
            count = min(len(view), self._end - self._sent)
            self._request.send(view[:count])
            self._sent += count
            view = view[count:]
            if self._sent == self._end or self._request.was_answered:
                self._heard(self._request.finish())

    def _heard(self, answer: BucketAnswer) -> None:
        self._request = None
        if self._sent == self.session.size:
            self.archive.finished(self.session, self.path, answer)
            return
        if answer.status != 308:
            raise self.archive.refused(self.session, self.path, answer)
        match = PERSISTED.fullmatch(answer.headers.get("Range", ""))
        if match is None or int(match[1]) + 1 < self._end:
            raise ArchiveUnavailable(
                f"{self.archive.address}/{self.path}: the server took only a part of what was sent"
            )

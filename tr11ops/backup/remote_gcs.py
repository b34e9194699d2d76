"""A Google Cloud Storage bucket. gcsfs says who we are and where the bucket is; the bytes go over
`remote_http`.

Files above 4 MiB are sent through a resumable upload session, in requests of 64 MiB: after any
failure, a kill -9 included, the server is asked how much it has, and the rest is sent. Until the
last byte is there nothing is to be seen, nothing has to be deleted afterwards, and the bucket may
have a retention lock. Sessions live for a week.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import httpx2

from tr11ops.backup.base import Pieces, RemoteFile, Unread
from tr11ops.backup.folder import Owner
from tr11ops.backup.ownership import RunMarker
from tr11ops.backup.remote_http import BucketClient, error_of_status, error_of_token, message_of
from tr11ops.backup.upload_sessions import UploadSession, UploadSessions, session_key
from tr11ops.base.errors import (
    ArchiveError,
    ArchivePermanentError,
    ArchiveUnavailable,
    ForeignAnswer,
)
from tr11ops.base.http import Headers, PageTrail, json_object, record_in, wait_of
from trainer.contract.record import Record

# What a bucket of Google's answers, as far as it is used here; all else in an answer is passed
# over. Pure.

_COUNT = re.compile(r"[0-9]{1,18}")  # the JSON of Google's has 64-bit numbers as text
_PART = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


class ObjectFacts(Record):
    """A whole object. Raises ValueError where its size is none."""

    name: str
    size: str

    def __post_init__(self) -> None:
        if _COUNT.fullmatch(self.size) is None:
            raise ValueError("its size is no count of bytes")

    @property
    def bytes(self) -> int:
        return int(self.size)


class Listing(Record):
    """One page of names. Without its `kind` an empty object would be a bucket without a file."""

    kind: Literal["storage#objects"]
    items: tuple[dict[str, Any], ...] = ()
    nextPageToken: str = ""

    def objects(self, prefix: str) -> tuple[ObjectFacts, ...]:
        """What is listed, all of it below `prefix`. Raises ForeignAnswer."""
        found = tuple(record_in(ObjectFacts, item) for item in self.items)
        for one in found:
            if not one.name.startswith(prefix):
                raise ForeignAnswer("an object of elsewhere")
        return found


class RewriteState(Record):
    """How far the copying of an object inside the bucket is. Raises ValueError where nothing says
    how it goes on.
    """

    kind: Literal["storage#rewriteResponse"]
    done: bool
    rewriteToken: str = ""
    totalBytesRewritten: str = ""

    def __post_init__(self) -> None:
        if not self.done and not self.rewriteToken:
            raise ValueError("not done, and no token to go on with")


def is_part(headers: Headers, offset: int, length: int | None) -> bool:
    """Whether an answer is of the bytes from `offset` on: `length` of them, or to the file's end."""
    match = _PART.fullmatch(headers.get("Content-Range", ""))
    if match is None:
        return False
    first, last = int(match[1]), int(match[2])
    count = str(last - first + 1)
    if first != offset or headers.get("Content-Length", count) != count:
        return False
    if length is None:
        ends = []
    else:
        ends = [offset + length - 1]
    if match[3] != "*":
        ends.append(int(match[3]) - 1)
    return not ends or last == min(ends)


REQUEST_BYTES = 64 << 20
QUANTUM_BYTES = 256 << 10  # a session takes multiples of this, but for its end
SMALL_BYTES = 4 << 20  # sent in one request, without a session
TIMEOUT_SECONDS = 60.0
_ENDED = {404, 410}  # a session that is over
_PERSISTED = re.compile(r"bytes=0-(\d{1,18})")  # what the server has of a file

T = TypeVar("T")


class BucketAddress(Record):
    """Where an archive lies: `endpoint` as http(s)://host:port, `prefix` without slashes at its
    ends.

    `who`: which credentials are used, in words; `authorise` adds them to a request; `project` pays,
    where one must.
    """

    endpoint: str
    name: str
    prefix: str
    who: str
    authorise: Callable[[dict[str, str]], None]
    project: str = ""
    timeout: float = TIMEOUT_SECONDS
    request_bytes: int = REQUEST_BYTES


class GcsArchive:
    """An `Archive` in a bucket. `owner`: whose it is, when something is written."""

    renames = False

    def __init__(
        self,
        name: str,
        address: str,
        bucket: BucketAddress,
        sessions: UploadSessions,
        owner: Owner,
    ) -> None:
        self.name = name
        self.address = address
        self._bucket = bucket
        self._sessions = sessions
        self._client = BucketClient(bucket.endpoint, bucket.timeout, address, self._authorise)
        self._is_there = threading.Event()
        self._marker = RunMarker(self, owner)

    def look(self, path: str) -> RemoteFile | None:
        answer = self._client.call("GET", self._object(path, fields="kind,name,size"))
        if answer.status_code == 404:
            self._require_bucket()
            return None
        return RemoteFile(path, self._facts(answer, path).bytes)

    def list(self, folder: str, unread: Unread | None = None) -> Iterator[RemoteFile]:
        base = ""
        if self._bucket.prefix:
            base = f"{self._bucket.prefix}/"
        if folder.strip("/"):
            prefix = f"{base}{folder.strip('/')}/"
        else:
            prefix = base
        token, trail, names = "", PageTrail(), PageTrail()
        while True:
            query = {
                "prefix": prefix,
                "fields": "kind,items(name,size),nextPageToken",
                "maxResults": "1000",
            }
            answer = self._client.call("GET", self._objects(**query, pageToken=token))
            with self._understanding():
                page = self._answered(Listing, answer, "")
                found = page.objects(prefix)
                for one in found:
                    names.follow(one.name)
                trail.follow(page.nextPageToken)
            for one in found:
                if not one.name.endswith("/"):  # else what a browser shows as an empty folder
                    yield RemoteFile(one.name[len(base) :], one.bytes)
            token = page.nextPageToken
            if not token:
                return

    def upload(self, path: str, size: int, identity: str, pieces: Pieces) -> None:
        self._marker.require()
        if size <= min(SMALL_BYTES, self._bucket.request_bytes):
            self.put(path, b"".join(pieces(0)))
            return
        session, sent = self._session(path, size, identity)
        source = _held_back(pieces(sent))
        rest: list[bytes] = []
        while sent < size:
            end = self._request_end(sent, size)
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Length": str(end - sent),
                "Content-Range": f"bytes {sent}-{end - 1}/{size}",
            }
            body = _next_bytes(source, rest, end - sent)
            answer = self._client.call("PUT", session.target, body, headers)
            sent = end
            if sent == size:
                self._finished(session, path, answer)
            elif answer.status_code != 308:
                raise self._refused(session, path, answer)
            elif _held_by_server(answer) < sent:
                raise ArchiveUnavailable(
                    f"{self.address}/{path}: the server took only a part of what was sent"
                )
        for _ in source:
            raise ValueError(f"{path}: more than the {size} bytes that were announced")

    def _session(self, path: str, size: int, identity: str) -> tuple[UploadSession, int]:
        """The session that sends a file, and from where on: one that was left is gone on with."""
        name = self._name(path)
        server, bucket = self._bucket.endpoint, self._bucket.name
        saved = self._sessions.find(
            session_key(server, bucket, name=name, size=size, identity=identity)
        )
        if saved is not None:
            offset = self._persisted(path, saved)
            if offset is not None:
                return saved, offset
        return self._begin(path, size, identity), 0

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        if length == 0:
            return
        headers = {"Cache-Control": "no-cache"}
        if offset or length is not None:
            if length is None:
                headers["Range"] = f"bytes={offset}-"
            else:
                headers["Range"] = f"bytes={offset}-{offset + length - 1}"
        target = self._object(path, alt="media")
        with self._client.ask("GET", target, headers=headers) as answer:
            if answer.status_code == 416:  # from the end on
                return
            if answer.status_code == 404:
                self._require_bucket()
                raise ArchivePermanentError(f"{self.address}/{path}: is not there")
            if answer.status_code not in {200, 206}:
                self._client.finish(answer)
                raise self._error(answer, path)
            if offset and answer.status_code != 206:
                raise ArchivePermanentError(
                    f"{self.address}/{path}: the server cannot read from a place inside a file"
                )
            if answer.status_code == 206:
                if "Range" not in headers or not is_part(answer.headers, offset, length):
                    raise self._foreign()
                length = None
            yield from _first(answer.iter_raw(), length)

    def put(self, path: str, content: bytes) -> None:
        target = self._uploads(uploadType="media", name=self._name(path))
        headers = {"Content-Type": "application/octet-stream"}
        self._check_size(
            path,
            self._facts(self._client.call("POST", target, content, headers), path),
            len(content),
        )

    def move(self, path: str, to: str) -> None:
        """As the protocol says; one that was cut off may be called again."""
        files, there = self._sizes(path), self._sizes(to)
        shared = files.keys() & there.keys()
        if not files:
            raise ArchivePermanentError(
                f"{self.address}/{path} is not there, and cannot get the name {to}"
            )
        if any(files[name] != there[name] for name in shared) or (
            shared != files.keys() and shared != there.keys()
        ):
            raise ArchivePermanentError(
                f"{self.address}/{to} is there already, and is not replaced"
            )
        for name in files:
            if name not in there:
                self._rewrite(f"{path}{name}", f"{to}{name}")
        there = self._sizes(to)
        for name, size in files.items():
            if there.get(name) != size:
                raise ArchiveUnavailable(
                    f"{self.address}/{path}{name} was copied to {to}{name}, and is not there"
                )
        for name in files:
            self._delete(f"{path}{name}")

    def free_bytes(self) -> int | None:
        return None

    def sweep(self, older_than: float) -> int:
        """Ends this user's upload sessions that were begun before; the bucket itself never holds an
        unfinished file.
        """
        count = 0
        for session in self._sessions:
            if (session.server, session.bucket) == (self._bucket.endpoint, self._bucket.name) and (
                session.begun < older_than and _is_below(session.name, self._bucket.prefix)
            ):
                answer = self._client.call("DELETE", session.target)
                if answer.status_code not in {200, 204, 400, 499, *_ENDED}:
                    raise self._error(answer, session.name)
                self._sessions.forget(session.key)
                count += 1
        return count

    def close(self) -> None:
        self._client.close()

    # ------------------------------------------------------------------ parts of an upload

    def _request_end(self, start: int, size: int) -> int:
        """Where a request ends that begins at `start`."""
        quanta = max(1, self._bucket.request_bytes // QUANTUM_BYTES)
        return min(size, start + quanta * QUANTUM_BYTES)

    def _refused(self, session: UploadSession, path: str, answer: httpx2.Response) -> ArchiveError:
        """What an answer other than the expected one means for an upload."""
        if answer.status_code in _ENDED:
            self._sessions.forget(session.key)
            return ArchiveUnavailable(
                f"{self.address}/{path}: the upload session has ended; the file is sent again"
            )
        error = self._error(answer, path)
        if not isinstance(error, ArchiveUnavailable):
            self._sessions.forget(session.key)
        return error

    def _finished(self, session: UploadSession, path: str, answer: httpx2.Response) -> None:
        """Check the object that a session has made. Raises ArchiveUnavailable when it is not whole:
        it is removed.

        After an answer that is none the session stays: the server can be asked again what became of
        it.
        """
        if answer.status_code not in {200, 201}:
            raise self._refused(session, path, answer)
        made = self._facts(answer, path)
        self._sessions.forget(session.key)
        self._check_size(path, made, session.size)

    # ------------------------------------------------------------------ one request each

    def _check_size(self, path: str, made: ObjectFacts, size: int) -> None:
        """Remove an object that has not all of its bytes, and raise ArchiveUnavailable."""
        if made.bytes != size:
            self._delete(path)
            raise ArchiveUnavailable(
                f"{self.address}/{path}: arrived with {made.bytes} of {size} bytes"
            )

    def _begin(self, path: str, size: int, identity: str) -> UploadSession:
        name = self._name(path)
        headers = {
            "Content-Type": "application/json; charset=UTF-8",
            "X-Upload-Content-Type": "application/octet-stream",
            "X-Upload-Content-Length": str(size),
        }
        answer = self._client.call(
            "POST", self._uploads(uploadType="resumable", name=name), b"{}", headers
        )
        if answer.status_code not in {200, 201}:
            raise self._error(answer, path)
        location = urlsplit(answer.headers.get("Location", ""))
        if not location.query:
            raise ArchiveUnavailable(f"{self.address}/{path}: the server began no upload session")
        target = f"{location.path}?{location.query}"
        session = UploadSession(
            self._bucket.endpoint,
            self._bucket.name,
            name=name,
            size=size,
            identity=identity,
            target=target,
            begun=time.time(),
        )
        self._sessions.keep(session)
        return session

    def _persisted(self, path: str, session: UploadSession) -> int | None:
        """How many bytes of a session's file the server has; None when the session is over."""
        headers = {"Content-Range": f"bytes */{session.size}"}
        answer = self._client.call("PUT", session.target, b"", headers)
        if answer.status_code == 308:
            held = _held_by_server(answer)
            if held >= session.size:  # more than a session holds that waits for its end
                self._sessions.forget(session.key)
                return None
            return held // QUANTUM_BYTES * QUANTUM_BYTES
        if answer.status_code in _ENDED:
            self._sessions.forget(session.key)
            return None
        if answer.status_code in {200, 201}:  # the last byte had arrived, its answer had not
            try:
                self._finished(session, path, answer)
            except ArchiveUnavailable:
                return None
            return session.size
        raise self._refused(session, path, answer)

    def _rewrite(self, path: str, to: str) -> None:
        source, target = quote(self._name(path), safe=""), quote(self._name(to), safe="")
        bucket, token, trail = quote(self._bucket.name, safe=""), "", PageTrail()
        while True:
            query = self._query(rewriteToken=token)
            where = f"/storage/v1/b/{bucket}/o/{source}/rewriteTo/b/{bucket}/o/{target}{query}"
            answer = self._client.call(
                "POST", where, b"{}", {"Content-Type": "application/json; charset=UTF-8"}
            )
            state = self._answered(RewriteState, answer, path)
            if state.done:
                return
            token = state.rewriteToken
            with self._understanding():
                trail.follow((token, state.totalBytesRewritten))

    def _sizes(self, path: str) -> dict[str, int]:
        """Bytes of a file, or of all files below a folder, by what follows `path` in their names."""
        file = self.look(path)
        if file is not None:
            found = {"": file.bytes}
        else:
            found = {}
        return found | {below.path[len(path) :]: below.bytes for below in self.list(path)}

    def _delete(self, path: str) -> None:
        answer = self._client.call("DELETE", self._object(path))
        if answer.status_code not in {200, 204, 404}:
            raise self._error(answer, path)

    def _require_bucket(self) -> None:
        """Something is not there: raise ArchivePermanentError when the bucket is not. Asked once."""
        if not self._is_there.is_set():
            answer = self._client.call("GET", self._objects(maxResults="1", fields="kind"))
            if answer.status_code == 404:
                raise ArchivePermanentError(
                    f"{self.address}: there is no bucket {self._bucket.name}; check backup.url"
                )
            self._answered(Listing, answer, "")
            self._is_there.set()

    def _facts(self, answer: httpx2.Response, path: str) -> ObjectFacts:
        """The object at `path`, where an answer is about it."""
        found = self._answered(ObjectFacts, answer, path)
        if found.name != self._name(path):
            raise self._foreign()
        return found

    def _answered(self, kind: type[T], answer: httpx2.Response, path: str) -> T:
        if answer.status_code not in {200, 201}:
            raise self._error(answer, path)
        with self._understanding():
            return record_in(kind, json_object(answer.content))

    @contextmanager
    def _understanding(self) -> Iterator[None]:
        """What is no answer of an object store may be one at the next try; nothing follows from it."""
        try:
            yield
        except ForeignAnswer:
            raise self._foreign() from None

    def _foreign(self) -> ArchiveUnavailable:
        return ArchiveUnavailable(
            f"{self.address}: what answers there does not speak as an object store does"
        )

    def _error(self, answer: httpx2.Response, path: str) -> ArchiveError:
        if path and answer.status_code not in {401, 403, 404}:
            where = f"{self.address}/{path}"
        else:
            where = self.address
        wait = wait_of(answer.headers, time.time())
        return error_of_status(
            answer.status_code,
            where,
            who=self._bucket.who,
            message=message_of(answer.content),
            wait=wait,
        )

    def _authorise(self, headers: dict[str, str]) -> None:
        try:
            self._bucket.authorise(headers)
        except Exception as error:  # of any library that fetches tokens
            raise error_of_token(error, self.address, self._bucket.who) from None

    def _name(self, path: str) -> str:
        if self._bucket.prefix:
            return f"{self._bucket.prefix}/{path}"
        return path

    def _object(self, path: str, **query: str) -> str:
        bucket, name = quote(self._bucket.name, safe=""), quote(self._name(path), safe="")
        return f"/storage/v1/b/{bucket}/o/{name}{self._query(**query)}"

    def _objects(self, **query: str) -> str:
        return f"/storage/v1/b/{quote(self._bucket.name, safe='')}/o{self._query(**query)}"

    def _uploads(self, **query: str) -> str:
        return f"/upload/storage/v1/b/{quote(self._bucket.name, safe='')}/o{self._query(**query)}"

    def _query(self, **query: str) -> str:
        given = {name: value for name, value in query.items() if value}
        if self._bucket.project:
            given["userProject"] = self._bucket.project
        if given:
            return f"?{urlencode(given, quote_via=quote)}"
        return ""


def _is_below(name: str, prefix: str) -> bool:
    return not prefix or name.startswith(f"{prefix}/")


def _held_by_server(answer: httpx2.Response) -> int:
    """How many bytes of a session's file the server says it has."""
    match = _PERSISTED.fullmatch(answer.headers.get("Range", ""))
    if match is None:
        return 0
    return int(match[1]) + 1


def _held_back(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Each piece once the next is there: what the source says at its end comes before its last byte
    is sent, with which the file becomes visible.
    """
    last = b""
    for piece in pieces:
        if last:
            yield last
        last = piece
    if last:
        yield last


def _next_bytes(source: Iterator[bytes], rest: list[bytes], length: int) -> Iterator[bytes]:
    """The next so many bytes of a source; what its last piece has beyond is left in `rest`."""
    while length:
        if not rest:
            rest.append(next(source, b""))
        piece = rest.pop()
        if not piece:
            raise ValueError("fewer bytes than were announced")
        if len(piece) > length:
            rest.append(piece[length:])
            piece = piece[:length]
        length -= len(piece)
        yield piece


def _first(pieces: Iterator[bytes], length: int | None) -> Iterator[bytes]:
    """No more than `length` bytes of an answer, all of it for None."""
    for piece in pieces:
        if length is None:
            yield piece
            continue
        yield piece[:length]
        length -= min(length, len(piece))
        if not length:
            return

"""Archives behind a URL: a bucket of Google's (`remote_gcs`), or whatever else fsspec can open."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from tr11ops.backup.base import Archive, Pieces, RemoteFile, Unread, as_pieces
from tr11ops.backup.folder import NO_ONE, Owner
from tr11ops.backup.ownership import RunMarker
from tr11ops.backup.remote_gcs import REQUEST_BYTES, TIMEOUT_SECONDS, BucketAddress, GcsArchive
from tr11ops.backup.remote_http import error_of_exception
from tr11ops.backup.upload_sessions import UploadSessions, sessions_folder
from tr11ops.base.errors import (
    ArchiveError,
    ArchivePermanentError,
    ArchiveUnavailable,
    PrivateFileError,
)
from tr11ops.base.private_file import private_text
from tr11ops.base.redact import one_line

# An archive in any file system of fsspec's.
#
# A file is sent whole under a hidden name and then moved; one that was cut off is sent again from its
# beginning.

PARTS = ".tr11-parts"
PIECE_BYTES = 4 << 20


class FsspecArchive:
    """An `Archive` in any file system of fsspec's."""

    renames = False

    def __init__(self, name: str, address: str, files: Any, root: str, owner: Owner) -> None:
        self.name = name
        self.address = address
        self._files = files
        self._root = root
        self._marker = RunMarker(self, owner)

    def look(self, path: str) -> RemoteFile | None:
        with self.asking(path):
            facts = self._facts(self._full(path))
            if facts is None:
                return None
            return self._file(path, facts)

    def list(self, folder: str, unread: Unread | None = None) -> Iterator[RemoteFile]:
        with self.asking(folder):
            found = self._find(folder.strip("/"))
            files = [
                self._file(path, facts) for path, facts in found if not path.startswith(f"{PARTS}/")
            ]
        yield from files

    def upload(self, path: str, size: int, identity: str, pieces: Pieces) -> None:
        self._marker.require()
        part = self._full(f"{PARTS}/{secrets.token_hex(8)}")
        try:
            self._send(path, part, pieces(0))
            with self.asking(path):
                arrived = self._files.info(part).get("size")
            if arrived != size:
                raise ArchiveUnavailable(
                    f"{self.address}/{path}: arrived with {arrived} of {size} bytes"
                )
        except BaseException:
            # the connection may be gone; what is left there, the sweep removes
            with suppress(Exception):
                self._files.rm_file(part)
            raise
        self._publish(part, path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        with self.asking(path):
            try:
                stream = self._files.open(self._full(path), "rb", cache_type="none")
            except FileNotFoundError:
                raise ArchivePermanentError(f"{self.address}/{path}: is not there") from None
            with stream:
                stream.seek(offset)
                left = length
                while left is None or left > 0:
                    piece = stream.read(PIECE_BYTES if left is None else min(PIECE_BYTES, left))
                    if not piece:
                        break
                    if left is None:
                        left = None
                    else:
                        left = left - len(piece)
                    yield piece

    def put(self, path: str, content: bytes) -> None:
        self.upload(path, len(content), "", as_pieces(content))

    def move(self, path: str, to: str) -> None:
        with self.asking(path):
            if self._find(to):
                raise ArchivePermanentError(
                    f"{self.address}/{to} is there already, and is not replaced"
                )
            found = self._find(path)
            if not found:
                raise ArchivePermanentError(
                    f"{self.address}/{path} is not there, and cannot get the name {to}"
                )
            for old, _ in found:
                self._publish(self._full(old), f"{to}{old[len(path) :]}")

    def free_bytes(self) -> int | None:
        return None

    def sweep(self, older_than: float) -> int:
        count = 0
        with self.asking(PARTS):
            for path, facts in self._find(PARTS):
                if _time_of(facts) < older_than:
                    with suppress(FileNotFoundError):
                        self._files.rm_file(self._full(path))
                        count += 1
        return count

    def close(self) -> None:
        """Nothing is held."""

    def _send(self, path: str, part: str, pieces: Iterator[bytes]) -> None:
        """Write a file under a hidden name; errors of `pieces` are none of the archive's."""
        with self.asking(path):
            self._files.makedirs(part.rpartition("/")[0], exist_ok=True)
            stream = self._files.open(part, "wb")
        try:
            for piece in pieces:
                with self.asking(path):
                    stream.write(piece)
        except BaseException:
            with suppress(Exception):
                stream.close()
            raise
        with self.asking(path):
            stream.close()

    def _publish(self, full: str, path: str) -> None:
        """Give a whole file its name; where that takes copying, the old one goes last."""
        with self.asking(path):
            target = self._full(path)
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.mv_file(full, target) if hasattr(
                self._files, "mv_file"
            ) else self._files.mv(full, target)

    @contextmanager
    def asking(self, path: str) -> Iterator[None]:
        """What the library says of a path, as one of the archive's errors."""
        try:
            yield
        except (ArchiveError, GeneratorExit):
            raise
        except Exception as error:  # every library has its own
            raise error_of_exception(error, f"{self.address}/{path}", "its credentials") from None

    def _file(self, path: str, facts: Mapping[str, Any]) -> RemoteFile:
        """A file, where the library tells its size: some servers do not, and then it is not known
        to be whole.
        """
        size = facts.get("size")
        if not isinstance(size, int) or size < 0:
            raise ArchiveUnavailable(f"{self.address}/{path}: the server does not tell its size")
        return RemoteFile(path, size)

    def _facts(self, full: str) -> Mapping[str, Any] | None:
        try:
            facts: Mapping[str, Any] = self._files.info(full)
        except FileNotFoundError:
            return None
        if facts["type"] == "file":
            return facts
        return None

    def _find(self, folder: str) -> Sequence[tuple[str, Mapping[str, Any]]]:
        try:
            found = self._files.find(self._full(folder), detail=True)
        except FileNotFoundError:
            return []
        return [
            (name[len(self._root) + 1 :], facts)
            for name, facts in found.items()
            if facts["type"] == "file"
        ]

    def _full(self, path: str) -> str:
        if path:
            return f"{self._root}/{path}"
        return self._root


def _time_of(facts: Mapping[str, Any]) -> float:
    """When a file was written, in epoch seconds; now, when no one says."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created", "modified"):
        value = facts.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return time.time()


Options: TypeAlias = Mapping[str, str | int | float | bool]

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "oci": "ocifs",
    "hdfs": "pyarrow",
}


def open_remote(
    url: str,
    options: Options | None = None,
    credentials_file: Path | None = None,
    name: str = "url",
    owner: Owner = NO_ONE,
    environment: Mapping[str, str] = os.environ,
) -> Archive:
    """The archive at a URL; nothing is asked of the destination yet. `options` are those of
    fsspec's file system.

    `owner`: whose archive it is; the first upload marks it so, and is refused where another
    run has marked it.

    Raises ArchivePermanentError when the URL, an option, a library or the credentials will not do.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ArchivePermanentError(f"{one_line(url)}: is not a URL such as gs://BUCKET/PATH")
    if "@" in match[2] or "?" in match[2] or "#" in match[2]:
        raise ArchivePermanentError(
            f"{match[1]}://...: a URL of an archive holds no @, ? or #; credentials belong into backup.credentials_file"
        )
    if match[1] in {"gs", "gcs"}:
        return _open_bucket(
            url,
            dict(options or {}),
            credentials_file=credentials_file,
            name=name,
            owner=owner,
            environment=environment,
        )
    return _open_any(
        url.rstrip("/"),
        dict(options or {}),
        credentials_file=credentials_file,
        name=name,
        owner=owner,
    )


def _open_bucket(
    url: str,
    options: dict[str, Any],
    credentials_file: Path | None,
    name: str,
    owner: Owner,
    environment: Mapping[str, str],
) -> GcsArchive:
    place = urlsplit(url)
    if not place.netloc:
        raise ArchivePermanentError(f"{url}: names no bucket; write gs://BUCKET/PATH")
    # not gcsfs.GCSFileSystem: it waits for gRPC before anything else
    from gcsfs.core import GCSFileSystem

    address = f"gs://{place.netloc}{place.path.rstrip('/')}"
    timeout = float(options.pop("requests_timeout", None) or TIMEOUT_SECONDS)
    request_bytes = int(options.pop("block_size", None) or REQUEST_BYTES)
    token, who = _google_token(options.pop("token", None), credentials_file, address)
    try:
        files = GCSFileSystem(
            **{**options, "token": token, "asynchronous": True, "skip_instance_cache": True}
        )
    except Exception as error:  # of any library that looks for credentials
        raise _no_credentials(error, address, who) from None
    endpoint = urlsplit(files.base)
    if (
        token != "anon"
        and endpoint.scheme != "https"
        and endpoint.hostname not in {"127.0.0.1", "localhost", "::1"}
    ):
        raise ArchivePermanentError(
            f"{address}: credentials are not sent to {endpoint.netloc} without https"
        )
    if isinstance(files.requester_pays, str):
        payer = files.requester_pays
    else:
        payer = files.project or ""
    bucket = BucketAddress(
        endpoint=files.base.removesuffix("/storage/v1/"),
        name=place.netloc,
        prefix=place.path.strip("/"),
        who=who,
        authorise=files.credentials.apply,
        project=payer if files.requester_pays else "",
        timeout=timeout,
        request_bytes=request_bytes,
    )
    return GcsArchive(name, address, bucket, UploadSessions(sessions_folder(environment)), owner)


def _google_token(token: Any, credentials_file: Path | None, address: str) -> tuple[Any, str]:
    """What gcsfs takes as `token`, and the credentials in words."""
    if credentials_file is None:
        if token not in {None, "anon", "google_default", "cloud"}:
            raise ArchivePermanentError(
                f"{address}: backup.options token must be anon, google_default or cloud"
            )
        return (
            token or "google_default",
            "no credentials" if token == "anon" else "the default credentials",
        )
    try:
        value = json.loads(private_text(credentials_file, group=True))
    except PrivateFileError as error:
        raise ArchivePermanentError(f"backup.credentials_file = {error}") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArchivePermanentError(
            f"backup.credentials_file = {credentials_file}: is not the JSON of an account"
        )
    from google import auth

    scope = "https://www.googleapis.com/auth/devstorage.full_control"
    try:
        load: Any = auth.load_credentials_from_dict
        credentials, _ = load(value, scopes=[scope])
    except Exception:  # its text may hold parts of the key
        raise ArchivePermanentError(
            f"backup.credentials_file = {credentials_file}: holds no key of an account"
        ) from None
    return credentials, f"the credentials in {credentials_file}"


def _no_credentials(error: Exception, address: str, who: str) -> ArchiveError:
    if type(error).__name__ == "DefaultCredentialsError":
        return ArchivePermanentError(
            f"{address}: no credentials were found; set backup.credentials_file, or type: "
            "gcloud auth application-default login"
        )
    if isinstance(error, TypeError | ValueError):
        return ArchivePermanentError(f"{address}: backup.options: {one_line(str(error))}")
    return error_of_exception(error, address, who)


def _open_any(
    url: str,
    options: dict[str, Any],
    credentials_file: Path | None,
    name: str,
    owner: Owner,
) -> FsspecArchive:
    import fsspec

    scheme = url.partition("://")[0]
    if credentials_file is not None:
        raise ArchivePermanentError(
            f"{url}: backup.credentials_file is read for gs:// alone; {scheme}:// finds its credentials itself"
        )
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        if package:
            cure = f"type: pip install {package}"
        else:
            cure = one_line(str(error))
        raise ArchivePermanentError(
            f"{url}: a library for {scheme}:// is missing; {cure}"
        ) from None
    except ValueError:
        raise ArchivePermanentError(f"{url}: nothing is known of {scheme}://") from None
    try:
        files = kind(**{**options, "use_listings_cache": False, "skip_instance_cache": True})
        # how every file system of fsspec names its paths
        root = str(kind._strip_protocol(url)).rstrip("/")
    except Exception as error:  # of any library
        raise error_of_exception(error, url, "the default credentials") from None
    return FsspecArchive(name, url, files, root, owner)

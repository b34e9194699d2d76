"""Archives behind a URL: a bucket of Google's (`remote_gcs`), or whatever else fsspec can open
(`remote_fsspec`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from tr11ops.backup.base import Archive
from tr11ops.backup.remote_errors import error_of_exception
from tr11ops.backup.remote_fsspec import FsspecArchive
from tr11ops.backup.remote_gcs import REQUEST_BYTES, TIMEOUT_SECONDS, BucketAddress, GcsArchive
from tr11ops.backup.remote_gcs_upload import UploadSessions, sessions_folder
from tr11ops.base.errors import ArchiveError, ArchivePermanentError, PrivateFileError
from tr11ops.base.private_file import private_text
from tr11ops.base.redact import one_line

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
    run: str = "",
    environment: Mapping[str, str] = os.environ,
    run_id: str = "",
) -> Archive:
    """The archive at a URL; nothing is asked of the destination yet. `options` are those of
    fsspec's file system.

    `run`, `run_id`: whose archive it is; the first upload marks it so, and is refused where another
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
            url, dict(options or {}), credentials_file, name, (run, run_id), environment
        )
    return _open_any(url.rstrip("/"), dict(options or {}), credentials_file, name, (run, run_id))


def _open_bucket(
    url: str,
    options: dict[str, Any],
    credentials_file: Path | None,
    name: str,
    owner: tuple[str, str],
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
    return GcsArchive(name, address, bucket, UploadSessions(sessions_folder(environment)), *owner)


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
    owner: tuple[str, str],
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
    return FsspecArchive(name, url, files, root, *owner)

"""What a destination's answer means, in one line that holds no secret: try again, never try again,
or no room.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping

from tr11ops.base.errors import (
    ArchiveError,
    ArchiveFull,
    ArchivePermanentError,
    ArchiveUnavailable,
    ForeignAnswer,
)
from tr11ops.base.http import json_object, may_pass
from tr11ops.base.redact import one_line

_FULL = re.compile(r"(?i)quota|no space|storage limit|insufficient storage|billing")
_RATE = re.compile(r"(?i)rate|too many|slow ?down|retry|requests per")


def error_of_status(
    status: int, where: str, who: str, message: str = "", wait: float = 0.0
) -> ArchiveError:
    """The error that an HTTP status stands for. `who`: which credentials were used, in words."""
    said = ""
    if message.strip():
        said = f": {one_line(message)}"
    is_rate = (status < 500 and may_pass(status)) or (status == 403 and bool(_RATE.search(message)))
    if is_rate:
        return ArchiveUnavailable(
            f"{where}: asks to be left alone for a while (HTTP {status})", wait
        )
    if status == 507 or (status == 403 and _FULL.search(message)):
        return ArchiveFull(f"{where}: no room or no quota is left there (HTTP {status}){said}")
    if may_pass(status):
        return ArchiveUnavailable(f"{where}: has a fault of its own (HTTP {status})", wait)
    texts = {
        401: f"{who} are not accepted{said}; set backup.credentials_file to a valid key",
        403: f"{who} may not do this{said}; give their account the role Storage Object User on the bucket",
        404: "is not there (HTTP 404); check its name",
        410: "is no longer there (HTTP 410); check its name",
    }
    return ArchivePermanentError(
        f"{where}: {texts.get(status, f'does not take the request (HTTP {status}){said}')}"
    )


def error_of_exception(error: BaseException, where: str, who: str) -> ArchiveError:
    """The error that a library's exception stands for; one that says nothing of itself may be gone
    at the next try.
    """
    if isinstance(error, ArchiveError):
        return error
    status = status_of(error)
    if status is not None:
        return error_of_status(status, where, who, str(error))
    if type(error).__name__ in {
        "NoCredentialsError",
        "PartialCredentialsError",
        "DefaultCredentialsError",
    }:
        return ArchivePermanentError(
            f"{where}: no credentials were found; set backup.credentials_file"
        )
    if isinstance(error, OSError):
        return _error_of_system(error, where, who)
    return ArchiveUnavailable(f"{where}: {type(error).__name__}: {one_line(str(error))}")


def _error_of_system(error: OSError, where: str, who: str) -> ArchiveError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return ArchiveFull(f"{where}: {error.strerror}")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return ArchivePermanentError(f"{where}: {error.strerror or 'not allowed'} ({who})")
    if isinstance(
        error, FileNotFoundError | NotADirectoryError | IsADirectoryError | FileExistsError
    ):
        return ArchivePermanentError(f"{where}: {error.strerror or 'is not there'}")
    if isinstance(error, TimeoutError):
        what = "no answer in time"
    else:
        what = one_line(error.strerror or type(error).__name__)
    return ArchiveUnavailable(f"{where}: {what}")


def status_of(error: BaseException) -> int | None:
    """The HTTP status that a library's exception carries, wherever it keeps it; None when it has
    none.
    """
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(value, int):
            return value
        return None
    for holder, name in (
        (error, "status"),
        (error, "status_code"),
        (error, "code"),
        (response, "status_code"),
    ):
        value = getattr(holder, name, None)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
            return value
    return None


def message_of(body: bytes) -> str:
    """What the server says was wrong; "" when it says nothing that is meant for people."""
    try:
        error = json_object(body)["error"]
        if isinstance(error, dict):
            return str(error["message"])
        return str(error)
    except (ForeignAnswer, KeyError):
        return ""


def error_of_token(error: Exception, where: str, who: str) -> ArchiveError:
    """What it means that no token could be had. google-auth says itself whether another try may
    help.
    """
    chain = (error, *([error.__cause__] if error.__cause__ is not None else []))
    kinds = {type(one).__name__ for one in chain}
    if "TransportError" in kinds or any(getattr(one, "retryable", False) for one in chain):
        return ArchiveUnavailable(f"{where}: the server that gives out tokens does not answer")
    if kinds & {"RefreshError", "HttpError", "NonRetryableError", "DefaultCredentialsError"}:
        return ArchivePermanentError(
            f"{where}: {who} are not accepted; set backup.credentials_file to a valid key"
        )
    return error_of_exception(error, where, who)

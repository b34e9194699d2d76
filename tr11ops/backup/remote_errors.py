"""What a far side's answer means, in one line that holds no secret: try again, never try again, or no room."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from email.message import Message
from email.utils import parsedate_to_datetime

from tr11ops.backup.base import ArchiveAway, ArchiveError, ArchiveFull, ArchiveRefused

LONGEST_TEXT = 200
LONGEST_WAIT_SECONDS = 3600.0
_SECRETS = (
    (
        re.compile(r"(?i)\b(bearer|basic|token|key|secret|signature|password|upload_id|access_token)([=:\s]+)\S+"),
        r"\1\2...",
    ),
    (re.compile(r"://[^/\s@]+@"), "://...@"),
    (re.compile(r"(https?://[^\s?]+)\?\S+"), r"\1?..."),
    (re.compile(r"\bya29\.\S+"), "..."),  # how an OAuth token of Google begins
    (re.compile(r"-----BEGIN.*", re.DOTALL), "..."),
)
_FULL = re.compile(r"(?i)quota|no space|storage limit|insufficient storage|billing")
_RATE = re.compile(r"(?i)rate|too many|slow ?down|retry|requests per")


def one_line(text: str) -> str:
    """A foreign text as it may be shown: one line, not long, without addresses' queries, tokens and passwords."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return words if len(words) <= LONGEST_TEXT else words[: LONGEST_TEXT - 3] + "..."


def wait_of(headers: Message) -> float:
    """Seconds that `Retry-After` asks for, at most an hour; 0 when it asks for nothing that can be understood.

    A date is compared with the far side's own clock (`Date`), not with this machine's.
    """
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}", value):
        return min(float(value), LONGEST_WAIT_SECONDS)
    try:
        then, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("Date", ""))
        return min(max(0.0, (then - now).total_seconds()), LONGEST_WAIT_SECONDS)
    except (TypeError, ValueError):
        return 0.0


def error_of_status(status: int, where: str, who: str, message: str = "", wait: float = 0.0) -> ArchiveError:
    """The error that an HTTP status stands for. `who`: which credentials were used, in words."""
    said = f": {one_line(message)}" if message.strip() else ""
    is_rate = status in {408, 425, 429} or (status == 403 and bool(_RATE.search(message)))
    if is_rate:
        return ArchiveAway(f"{where}: asks to be left alone for a while (HTTP {status})", wait)
    if status == 507 or (status == 403 and _FULL.search(message)):
        return ArchiveFull(f"{where}: no room or no quota is left there (HTTP {status}){said}")
    if status >= 500:
        return ArchiveAway(f"{where}: has a fault of its own (HTTP {status})", wait)
    texts = {
        401: f"{who} are not accepted{said}; set backup.credentials_file to a valid key",
        403: f"{who} may not do this{said}; give their account the role Storage Object User on the bucket",
        404: "is not there (HTTP 404); check its name",
        410: "is no longer there (HTTP 410); check its name",
    }
    return ArchiveRefused(f"{where}: {texts.get(status, f'does not take the request (HTTP {status}){said}')}")


def error_of_exception(error: BaseException, where: str, who: str) -> ArchiveError:
    """The error that a library's exception stands for; one that says nothing of itself may be gone at the next try."""
    if isinstance(error, ArchiveError):
        return error
    status = status_of(error)
    if status is not None:
        return error_of_status(status, where, who, str(error))
    if type(error).__name__ in {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}:
        return ArchiveRefused(f"{where}: no credentials were found; set backup.credentials_file")
    if isinstance(error, OSError):
        return _error_of_system(error, where, who)
    return ArchiveAway(f"{where}: {type(error).__name__}: {one_line(str(error))}")


def _error_of_system(error: OSError, where: str, who: str) -> ArchiveError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return ArchiveFull(f"{where}: {error.strerror}")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return ArchiveRefused(f"{where}: {error.strerror or 'not allowed'} ({who})")
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | FileExistsError):
        return ArchiveRefused(f"{where}: {error.strerror or 'is not there'}")
    what = "no answer in time" if isinstance(error, TimeoutError) else one_line(error.strerror or type(error).__name__)
    return ArchiveAway(f"{where}: {what}")


def status_of(error: BaseException) -> int | None:
    """The HTTP status that a library's exception carries, wherever it keeps it; None when it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return value if isinstance(value, int) else None
    for holder, name in ((error, "status"), (error, "status_code"), (error, "code"), (response, "status_code")):
        value = getattr(holder, name, None)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
            return value
    return None

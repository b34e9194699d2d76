"""What a failure of the hub's library means to us: come again later, or a person is needed, and for
what.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from traceback import walk_tb
from urllib.parse import urlsplit

import httpx2
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from tr11ops.base.errors import (
    FileChanged,
    ForeignAnswer,
    HubConflict,
    HubError,
    HubMissing,
    HubPermanentError,
    HubUnavailable,
    NoAnswer,
)
from tr11ops.base.redact import one_line
from tr11ops.hub.address import host_of
from tr11ops.hub.credentials import Credentials
from tr11ops.hub.transport import why

_CURES = {
    402: "the account's room or plan is at its end",
    404: "there is no such thing, or the token may not see it; names are OWNER/NAME",
    409: "it is there already, or someone else is changing it",
    410: "it was taken away",
    412: "someone else has committed meanwhile",
    413: "too large",
}


def failure_of(
    error: Exception,
    what: str,
    endpoint: str,
    credentials: Credentials,
    secrets: Iterable[str] = (),
) -> Exception | None:
    """Our error for one of the library's. None for a fault of this program, which is to be raised
    as it is.
    """
    for found in _chain(error):
        known = _known(found, what, endpoint, credentials, secrets)
        if known is not None:
            return known
    is_foreign = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, ForeignAnswer))
    if is_foreign or _is_of_library(error):
        # such as a portal that asks for a login; an answer without what it should hold is a
        # KeyError of the library
        return HubUnavailable(
            f"{what}: what answers at {host_of(endpoint)} does not speak as a hub does"
        )
    if isinstance(error, ValueError):  # the library's word for answers and paths that it cannot use
        return HubPermanentError(one_line(f"{what}: {error}", secrets))
    return None


def _known(
    error: BaseException, what: str, endpoint: str, credentials: Credentials, secrets: Iterable[str]
) -> Exception | None:
    known: Exception | None = None
    match error:
        case HubError() | FileChanged():
            known = error
        case NoAnswer():
            known = HubUnavailable(one_line(f"{what}: {error}", secrets), error.wait)
        case HfHubHTTPError():
            known = _of_answer(error, what, endpoint, credentials, secrets)
        case httpx2.TransportError() | httpx2.DecodingError():  # while an answer was read
            known = HubUnavailable(f"{what}: {host_of(endpoint)} gives no answer ({why(error)})")
        case OfflineModeIsEnabled():
            known = HubPermanentError(
                f"{what}: HF_HUB_OFFLINE is set, so the hub is not asked; unset it"
            )
        case httpx2.InvalidURL() | HFValidationError():
            known = HubPermanentError(one_line(f"{what}: {error}", secrets))
    return known


def _of_answer(
    error: HfHubHTTPError,
    what: str,
    endpoint: str,
    credentials: Credentials,
    secrets: Iterable[str],
) -> HubError:
    status = error.response.status_code
    address = urlsplit(str(error.response.url))
    if address.netloc != urlsplit(endpoint).netloc:
        # storage that the hub sent us to: its signed address may have become too old; a new one is
        # got by asking again
        return HubUnavailable(f"{what}: the hub's storage answers {status}")
    said = one_line(error.server_message or "", secrets, limit=160)
    text = one_line(
        f"{what}: {host_of(endpoint)} answers {status}: {_cure(status, credentials)}", secrets
    )
    if said and said.lower() not in text.lower():
        text = f"{text} ({said})"
    kinds: dict[int, type[HubPermanentError]] = {404: HubMissing, 410: HubMissing, 412: HubConflict}
    return kinds.get(status, HubPermanentError)(text, status)


def _cure(status: int, credentials: Credentials) -> str:
    has_token = credentials.token is not None
    if status == 401 and has_token:
        return f"the token of {credentials.source} is not valid (any more); put a new one there"
    if status == 401:
        return "no token; name hub.credentials_file, set HF_TOKEN, or type: hf auth login"
    if status == 403:
        if has_token:
            whose = f"the token of {credentials.source}"
        else:
            whose = "who comes without a token"
        return f"{whose} has no permission for this; it needs write access to this repository"
    return _CURES.get(status, "it does not take what was sent")


def _is_of_library(error: Exception) -> bool:
    if isinstance(error, RecursionError):  # the JSON reader's, which the library's client asks
        return True
    if not isinstance(error, (LookupError, TypeError, AttributeError)):
        return False
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return bool(names) and str(names[-1]).startswith("huggingface_hub")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, the nearest first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )

"""Large files into the hub's chunked storage (Xet): of a log that only grew, no more than what is new is sent.

The library can do this for whole files alone; a log grows while it is sent, so its first bytes are streamed here. Where
a hub has no such storage, or a firewall lies before it, the caller sends the file whole, as a plain large object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from huggingface_hub import HfApi
from huggingface_hub.utils import build_hf_headers, get_session
from huggingface_hub.utils._runtime import is_xet_available  # as the library asks itself

from tr11ops.base.answers import json_object
from tr11ops.base.errors import ForeignAnswer
from tr11ops.hub.base import Repository
from tr11ops.hub.content import FileView
from trainer.contract.record import Record

SMALLEST_BYTES = 16 << 20  # below it one plain request is cheaper than the questions of this way
PIECE_BYTES = 4 << 20
# of the storage engine: by itself it tries for many minutes, in which no one can stop it
SETTINGS = {
    "client.connect_timeout": "15s",
    "client.read_timeout": "60s",
    "client.retry_max_attempts": 3,
    "client.retry_base_delay": "1s",
    "client.retry_max_duration": "60s",
    "telemetry.enabled": False,
}


class Chunked(Record):
    """One file that is to be sent so: `sha256` of all of the view, in hexadecimal digits."""

    path: str
    view: FileView
    sha256: str


def send_chunked(api: HfApi, repository: Repository, files: Sequence[Chunked]) -> dict[str, str]:
    """Send the files; returns each path's name in that storage, or nothing where it could not be done.

    $HF_HUB_DISABLE_XET switches it off, as for the library. Raises FileChanged.
    """
    if not is_xet_available():
        return {}
    headers = build_hf_headers(token=api.token)
    branch = quote(repository.branch, safe="")
    address = f"{api.endpoint}/api/{repository.kind}s/{repository.name}/xet-write-token/{branch}"
    access = _access(address, headers)
    if access is None:
        return {}
    try:
        return _stream(address, headers, access, files)
    except (OSError, RuntimeError, ValueError):  # the library's own words for a network that fails, and refusals
        for file in files:
            file.view.seek(0)
        return {}


def _access(address: str, headers: dict[str, str]) -> dict[str, Any] | None:
    """The short-lived token and where it is good for; None where there is no such storage."""
    answer = get_session().get(address, headers=headers)
    if answer.status_code != 200:
        return None
    try:
        told = json_object(answer.content)
        return {"endpoint": str(told["casUrl"]), "token": str(told["accessToken"]), "expiry": int(told["exp"])}
    except (ForeignAnswer, ValueError, KeyError, TypeError, OverflowError):
        return None


def _stream(address: str, headers: dict[str, str], access: dict[str, Any], files: Sequence[Chunked]) -> dict[str, str]:
    from hf_xet import XetConfig, XetSession
    from huggingface_hub.utils._xet import xet_headers_without_auth

    names = {}
    with XetSession(XetConfig().with_config(SETTINGS)).new_upload_commit(
        endpoint=access["endpoint"],
        token=access["token"],
        token_expiry_unix_secs=access["expiry"],
        token_refresh_url=address,
        token_refresh_headers=headers,
        custom_headers=xet_headers_without_auth(headers),
    ) as commit:
        for file in files:
            stream = commit.start_upload_stream(name=file.path, sha256=file.sha256)
            file.view.seek(0)
            while piece := file.view.read(PIECE_BYTES):
                stream.write(piece)
            names[file.path] = stream.finish().xet_info.hash
    return names

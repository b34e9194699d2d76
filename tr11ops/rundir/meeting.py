"""`state/meeting.json`: the key by which nodes without a scheduler know that they share one run directory.

Node 0 writes it when it begins to wait for the others, and takes it away when all is over. Who can read it may join.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from trainer.contract.files import host_name
from trainer.contract.paths import RunPaths
from trainer.contract.sharing import make_shared
from trainer.contract.state_file import put_in_place, read_json


def meeting_file(paths: RunPaths) -> Path:
    return paths.state / "meeting.json"


def write_meeting_key(paths: RunPaths, master: str) -> bytes:
    """A new key, for the run's user and group alone. Raises OSError."""
    path = meeting_file(paths)
    make_shared(path.parent)
    key = secrets.token_hex(32)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.fchmod(descriptor, 0o660)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump({"key": key, "master": master, "host": host_name(), "pid": os.getpid()}, stream)
        put_in_place(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return bytes.fromhex(key)


def read_meeting_key(paths: RunPaths) -> bytes | None:
    """The key of who waits now; None where there is none. Raises OSError, ValueError."""
    value = read_json(meeting_file(paths))
    return None if value is None else bytes.fromhex(str(value.get("key", "")))


def remove_meeting_key(paths: RunPaths) -> None:
    """Take the key away. One that cannot be is replaced by the next meeting."""
    with suppress(OSError):
        meeting_file(paths).unlink(missing_ok=True)

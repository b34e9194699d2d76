"""`state/meeting.json`: the key by which nodes without a scheduler know that they share one run
directory.

Node 0 writes it when it begins to wait for the others, and takes it away when all is over. Who can
read it may join.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from trainer.contract.files import host_name, write_atomically
from trainer.contract.paths import RunPaths
from trainer.contract.state_file import read_json


def meeting_file(paths: RunPaths) -> Path:
    return paths.state / "meeting.json"


def write_meeting_key(paths: RunPaths, master: str) -> bytes:
    """A new key, for the run's user and group alone. Raises OSError."""
    key = secrets.token_hex(32)
    value = {"key": key, "master": master, "host": host_name(), "pid": os.getpid()}
    write_atomically(meeting_file(paths), json.dumps(value), 0o660)
    return bytes.fromhex(key)


def read_meeting_key(paths: RunPaths) -> bytes | None:
    """The key of who waits now; None where there is none. Raises OSError, ValueError."""
    value = read_json(meeting_file(paths))
    if value is None:
        return None
    return bytes.fromhex(str(value.get("key", "")))


def remove_meeting_key(paths: RunPaths) -> None:
    """Take the key away. One that cannot be is replaced by the next meeting."""
    with suppress(OSError):
        meeting_file(paths).unlink(missing_ok=True)

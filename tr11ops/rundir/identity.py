"""Which run this is, whatever it is called and wherever its directory lies: an id made at the first
launch.

    state/run.json    {"schema": 1, "id": 32 hex digits, "run": its name, "created": seconds since the epoch}

Two runs may have one name; archives tell them apart by this. It is made once and never replaced but
by `adopt_run_id`.

    state/meeting.json    the key by which nodes without a scheduler know that they share one run directory

Node 0 writes it when it begins to wait for the others, and takes it away when all is over. Who can
read it may join.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import host_name, now, write_atomically, write_beside
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


SCHEMA = 1
_ID = re.compile(r"[0-9a-f]{32}")


def run_id(directory: RunDirectory) -> str:
    """The run's id; "" where none was made yet. Raises OSError, ValueError."""
    path = directory.paths.run_record
    value = read_json(path)
    if value is None:
        return ""
    found = value.get("id")
    if not isinstance(found, str) or not _ID.fullmatch(found):
        raise ValueError(f"{path} holds no id of a run")
    return found


def require_run_id(directory: RunDirectory, name: str) -> str:
    """The run's id, made if there is none: of many who make one at once, one is right. Raises
    OSError, ValueError.
    """
    from tr11ops.rundir.links import link_unless_taken

    found = run_id(directory)
    if found:
        return found
    path = directory.paths.run_record
    draft = write_beside(path, _text(secrets.token_hex(16), name))
    try:
        link_unless_taken(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return run_id(directory)


def adopt_run_id(directory: RunDirectory, name: str, found: str) -> None:
    """Go on as the run of this id: a run directory that was lost and begun again. Raises OSError,
    ValueError.
    """
    if not _ID.fullmatch(found):
        raise ValueError(f"{found[:40]!r} is no id of a run")
    write_atomically(directory.paths.run_record, _text(found, name))


def short(found: str) -> str:
    """An id as it is shown."""
    return found[:8] or "unknown"


def _text(found: str, name: str) -> str:
    return json.dumps({"schema": SCHEMA, "id": found, "run": name, "created": now()}) + "\n"

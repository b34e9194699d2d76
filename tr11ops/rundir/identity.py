"""Which run this is, whatever it is called and wherever its directory lies: an id made at the first
launch.

    state/run.json    {"schema": 1, "id": 32 hex digits, "run": its name, "created": seconds since the epoch}

Two runs may have one name; archives tell them apart by this. It is made once and never replaced but
by `adopt_run_id`.
"""

from __future__ import annotations

import json
import re
import secrets

from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import now, write_atomically, write_beside
from trainer.contract.state_file import read_json

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

"""Whether a run is paused, and by whom."""

from __future__ import annotations

import os

from tr11ops.rundir.paths import RunDirectory
from trainer.contract.state_file import read_json


def read_pause(directory: RunDirectory) -> str | None:
    """Who paused the run and why, in words; None when it is not paused. A file that cannot be read counts."""
    path = directory.paths.pause
    if not os.path.lexists(path):
        return None
    try:
        value = read_json(path) or {}
    except (OSError, ValueError):
        value = {}
    who, why = str(value.get("who") or "someone"), str(value.get("why") or "")
    return f"{who} ({why})" if why else who

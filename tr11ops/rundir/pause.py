"""Whether a run is paused, and by whom."""

from __future__ import annotations

from tr11ops.rundir.paths import RunDirectory
from trainer.contract.requests import read_request


def read_pause(directory: RunDirectory) -> str | None:
    """Who paused the run and why, in words; None when it is not paused. A file that cannot be read
    counts.
    """
    pause = read_request(directory.paths.pause, "pause")
    if pause is None:
        return None
    who = pause.who or "someone"
    if pause.why:
        return f"{who} ({pause.why})"
    return who

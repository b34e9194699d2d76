"""What a round of a periodic job puts on record, for tests."""

from __future__ import annotations

from pathlib import Path

from tests.tr11ops.cron.rounds import run_directory
from tr11ops.rundir.cron_records import PeriodicJobState, read_job


def state_of(folder: Path, name: str = "pulse") -> PeriodicJobState:
    state = read_job(run_directory(folder), name)
    assert isinstance(state, PeriodicJobState), state
    return state

"""Trainings of this run that `tr11 train` runs on this machine, outside any scheduler."""

from __future__ import annotations

import psutil

from tr11ops.observe.files import read_details
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import host_name


def foreground_trainings(directory: RunDirectory) -> tuple[str, ...]:
    """Foreground trainings of this run that are alive on this machine, in words."""
    found = []
    for job_id in directory.attempt_ids():
        if not job_id.startswith("foreground"):
            continue
        folder = directory.paths.attempt(job_id)
        record = read_details(folder / "attempt.json")
        if (folder / "verdict.json").exists() or record.get("batch_host") != host_name():
            continue
        if _is_alive(record.get("pid"), record.get("start")):
            found.append(f"tr11 train, process {record['pid']} on {record['batch_host']}")
    return tuple(found)


def _is_alive(pid: object, started: object) -> bool:
    """True when the process that was alive at `started` (seconds since the epoch) still lives; ids
    are reused.
    """
    if not isinstance(pid, int) or not isinstance(started, float):
        return False
    try:
        return psutil.Process(pid).create_time() <= started + 1.0
    except psutil.Error:
        return False

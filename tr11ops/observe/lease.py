"""Who trains in a run directory: the holder of its lease, and whether that trainer shows life; and
what `tr11 train` runs on this machine, outside any scheduler.
"""

from __future__ import annotations

import psutil

from tr11ops.observe.files import read_details
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import host_name
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record


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


ROLLBACK = "rollback"  # under which name a roll-back holds the run's lease


class LeaseHolder(Record):
    """Who holds the run's lease, and renewed it a moment ago. `job_id` is its scheduler's number,
    ROLLBACK of none.

    `process` is its number on its host, 0 where that is not known.
    """

    job_id: str
    host: str
    text: str
    process: int = 0

    def is_of(self, host: str) -> bool:
        """Is it a foreground training of this machine? Those are known by their processes."""
        return self.job_id.startswith("foreground") and self.host == host


def read_holder(paths: RunPaths, *clocks: float) -> LeaseHolder | None:
    """The living holder of the run's lease: its claim was renewed a moment ago, by any of `clocks`.
    Raises OSError.

    A claim that cannot be read is someone's as long as it is that young.
    """
    from trainer.contract.lease import living_claim

    claim = living_claim(paths, *clocks)
    if claim is None:
        return None
    if not claim.token:
        path = paths.state / "lease" / f"{claim.epoch}.json"
        return LeaseHolder("unknown", "", f"the trainer that made {path}, which cannot be read")
    return LeaseHolder(claim.job_id, claim.host, claim.told(paths), claim.pid)

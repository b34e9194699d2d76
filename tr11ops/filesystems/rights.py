"""Permission drift: how many files below a folder its group cannot use. Looks, within a time limit;
repairs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tr11ops.base.observed import Observed, Unknown
from tr11ops.rundir.permissions import PermissionTally, PermissionWalk
from trainer.contract.record import Record

# in one folder, beyond the time that there was: the file system is unreachable
HANGING_SECONDS = 30.0


class Drift(Record):
    """`wrong` of the `entries` that were looked at are not as the group needs them. `complete`: all
    were looked at.
    """

    entries: int
    wrong: int
    complete: bool


def read_drift(root: Path, seconds: float, clock: Callable[[], float]) -> Observed[Drift]:
    """Walk the tree below `root` for at most about `seconds` of `clock`."""
    deadline = clock() + seconds
    try:
        walk = PermissionWalk(root, root.stat().st_gid, repair=False)

        def stop_in_time(tally: PermissionTally) -> None:
            if clock() >= deadline:
                walk.stop()
            if clock() >= deadline + HANGING_SECONDS and tally.folders < tally.folders_found:
                raise TimeoutError(110, "it gives no answer")

        tally = walk.run(stop_in_time)
    except OSError as error:
        return Unknown(f"{root}: {error.strerror or error}")
    return Drift(tally.entries, tally.wrong, tally.folders == tally.folders_found)

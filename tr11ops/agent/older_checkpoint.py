"""Going on from an older checkpoint, where launches that begin from the newest one fail at one step
again and again.

The newest one is whole, as far as sizes and digests tell, and may be wrong all the same. Nothing is
renamed: `latest` names the older one, as a person would write it there, and the next saves follow
it.
"""

from __future__ import annotations

import time

from trainer.contract.checkpoint_names import (
    LATEST_FILE,
    checkpoint_name,
    checkpoint_steps,
    read_latest,
)
from trainer.contract.files import write_atomically
from trainer.contract.lease import clocks_of, living_claim
from trainer.contract.paths import RunPaths
from trainer.contract.recovery import read_recovery
from trainer.contract.resumable import ResumeNeed, search, size_faults


def older_sound(paths: RunPaths, step: int, need: ResumeNeed) -> int | None:
    """The newest checkpoint before `step` from which a training resumes; None where there is none.

    Raises OSError, or ValueError for a record of roll-backs that cannot be read.
    """
    older = [one for one in checkpoint_steps(paths.checkpoints) if one < step]
    return search(
        paths.checkpoints,
        read_recovery(paths).usable(older),
        latest=None,
        need=need,
        faults_of=size_faults,
    ).step


def point_to(paths: RunPaths, step: int, job_id: str) -> None:
    """Let `latest` name the checkpoint of `step`, for the launches to come of attempt `job_id` and
    after.

    Raises OSError, also where a trainer of another job has the run.
    """
    holder = living_claim(paths, *clocks_of(paths, time.time()))
    if holder is not None and holder.job_id != job_id:
        raise OSError(f"{holder.told(paths)} has the run: {LATEST_FILE} is not touched")
    write_atomically(paths.checkpoints / LATEST_FILE, checkpoint_name(step))


def point_back(
    paths: RunPaths, tried: int | None, newest: int | None, need: ResumeNeed, job_id: str
) -> bool:
    """Let `latest` name the newest checkpoint again, where it still names the older one that was
    tried in vain.

    Whether it did. Raises OSError or ValueError as the others do.
    """
    if (
        tried is None
        or newest is None
        or newest <= tried
        or read_latest(paths.checkpoints) != tried
    ):
        return False
    if (
        search(paths.checkpoints, [newest], latest=None, need=need, faults_of=size_faults).step
        is None
    ):
        return False
    point_to(paths, newest, job_id)
    return True

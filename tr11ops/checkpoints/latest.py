"""Moving `latest`, which decides what a start takes: never under a living trainer, nor to what none
resumes from.
"""

from __future__ import annotations

from pathlib import Path

from tr11ops.base.errors import LatestRefused
from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_name
from trainer.contract.files import write_atomically
from trainer.contract.lease import trained_into
from trainer.contract.resumable import ResumeNeed, judge, moves_back, size_faults


def require_no_trainer(folder: Path, now: float) -> None:
    """Raises LatestRefused while a living trainer holds the lease of the run whose checkpoints lie
    in `folder`.

    `now`: seconds since the epoch. Raises OSError where that cannot be seen.
    """
    why = trained_into(folder, now)
    if why:
        raise LatestRefused(why)


def require_newest(folder: Path, step: int, need: ResumeNeed) -> None:
    """Raises LatestRefused where a training could go on from a newer one, which it would replace in
    time.
    """
    why = moves_back(folder, step, need)
    if why:
        raise LatestRefused(why)


def move_latest(folder: Path, step: int, need: ResumeNeed, now: float) -> None:
    """Have `latest` in `folder` name a step from which a training resumes. Raises LatestRefused,
    OSError.
    """
    require_no_trainer(folder, now)
    require_newest(folder, step, need)
    _, fault = judge(folder, step, need, size_faults)
    if fault is not None:
        raise LatestRefused(
            f"{folder / LATEST_FILE} is not moved: no training resumes from {checkpoint_name(step)}: {fault.text}"
        )
    write_atomically(folder / LATEST_FILE, checkpoint_name(step))

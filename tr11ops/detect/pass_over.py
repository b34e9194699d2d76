"""The command that goes back before some iterations and passes over their data. Shared by detectors; pure."""

from __future__ import annotations

import shlex

from tr11ops.base.observed import known
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot


def pass_over(snapshot: Snapshot, first: int, last: int) -> str:
    """`tr11 rollback STEP --skip FIRST-LAST`, to the newest checkpoint before `first`; with the word STEP where there
    is none, or it is not known. Where nothing was saved as yet, a launch that leaves the data out from the start.

    An older one than the newest sound one was not looked into: the roll-back does that, and refuses one that is not
    whole.
    """
    checkpoints = known(snapshot.checkpoints, None)
    if checkpoints is not None and not checkpoints.steps:
        ranges = shlex.quote(f'data.skip_ranges=["{first}-{last}"]')
        return derived.command(snapshot, f"launch --replace --set {ranges}")
    sound = None if checkpoints is None else checkpoints.newest_sound
    steps = () if checkpoints is None or sound is None else (step for step in checkpoints.steps if step <= sound.step)
    step = max((step for step in steps if step < first), default="STEP")
    return derived.command(snapshot, f"rollback {step} --skip {first}-{last}")


def iterations(first: int, last: int) -> str:
    """These iterations in words."""
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"

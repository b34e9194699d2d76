"""The command that goes back before some iterations and passes over their data. Shared by detectors; pure."""

from __future__ import annotations

from tr11ops.base.observed import known
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot


def pass_over(snapshot: Snapshot, first: int, last: int) -> str:
    """`tr11 rollback STEP --skip FIRST-LAST`, from the newest sound checkpoint before `first`; with the word STEP where
    the newest sound one is later, or is not known."""
    checkpoints = known(snapshot.checkpoints, None)
    sound = None if checkpoints is None else checkpoints.newest_sound
    step = str(sound.step) if sound is not None and sound.step < first else "STEP"
    return derived.command(snapshot, f"rollback {step} --skip {first}-{last}")


def iterations(first: int, last: int) -> str:
    """These iterations in words."""
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"

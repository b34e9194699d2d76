"""Iterations whose data are passed over: the command for it, and how many there are. Shared by
detectors; pure.
"""

from __future__ import annotations

import shlex
from contextlib import suppress

from tr11ops.base.observed import known
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from trainer.contract.errors import RangeError
from trainer.schedule.skip import merge_ranges, parse_range


def pass_over(snapshot: Snapshot, first: int, last: int, lasts: bool = False) -> str:
    """`tr11 rollback STEP --skip FIRST-LAST`, to the newest checkpoint before `first`; with the
    word STEP where there is none, or it is not known. Where nothing was saved as yet, a launch that
    leaves the data out from the start.

    `lasts`: more may follow until the command is typed, so that it names no end, `--skip FIRST-`:
    the roll-back finds how far the training had come. (A launch cannot; its range is that of the
    look.)

    An older one than the newest sound one was not looked into: the roll-back does that, and refuses
    one that is not whole.
    """
    checkpoints = known(snapshot.checkpoints, None)
    if checkpoints is not None and not checkpoints.steps:
        ranges = shlex.quote(f'data.skip_ranges=["{first}-{last}"]')
        return derived.command(snapshot, f"launch --replace --set {ranges}")
    sound = checkpoints and checkpoints.newest_sound
    steps: tuple[int, ...] = ()
    if checkpoints is not None and sound:
        steps = tuple(step for step in checkpoints.steps if step <= sound.step and step < first)
    step = max(steps, default="STEP")
    return derived.command(snapshot, f"rollback {step} --skip {first}-{'' if lasts else last}")


def is_rollback(passing: str) -> bool:
    """Whether a command that passes over data goes back to a checkpoint; else it launches from the
    start.
    """
    return "rollback" in passing.split()


def after_passing(snapshot: Snapshot, passing: str) -> tuple[str, ...]:
    """What lets it train on after a roll-back; a launch that leaves the data out needs nothing
    more.
    """
    if not is_rollback(passing):
        return ()
    return (
        derived.command(snapshot, "resume" if snapshot.pending_jobs else "launch --array 1-10"),
    )


def iterations(first: int, last: int) -> str:
    """These iterations in words."""
    if first == last:
        return f"iteration {first}"
    return f"iterations {first} to {last}"


def skipped_iterations(snapshot: Snapshot, after: int, last: int) -> int:
    """How many of the iterations behind `after`, up to `last`, are passed over: by the card, or by
    a roll-back.
    """
    ranges = list(snapshot.run.skip_ranges)
    for event in derived.standing_rollbacks(snapshot):
        with suppress(RangeError):  # "nothing"
            ranges.append(parse_range(str(event.values.get("skip"))))
    return sum(
        max(0, min(one.last, last) - max(one.first, after + 1) + 1) for one in merge_ranges(ranges)
    )

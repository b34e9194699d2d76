"""The checkpoints of a foreign launch, as the keeper of node 0 goes by them: made ready before the
start, held while it trains, seen whole after its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from tr11ops.trainers.checkpoints import CheckpointSurvey, survey
from tr11ops.trainers.held import HoldPlace
from tr11ops.trainers.hold import Holder
from tr11ops.trainers.prepare import prepare
from tr11ops.trainers.start import TakenCheckpoint
from trainer.contract.attempt import UnheldCheckpoint

Say = Callable[[str], None]
Fence = Callable[[], None]


class Saves:
    """Those of a trainer whose dialect tells of checkpoints; of any other nothing is known. `place` is
    None there. `before`: what was whole when the launch began.
    """

    def __init__(self, place: HoldPlace | None, fence: Fence, say: Say) -> None:
        self.before: CheckpointSurvey | None = None
        self._place, self._fence, self._say = place, fence, say
        self._holder: Holder | None = None

    @property
    def seen(self) -> CheckpointSurvey | None:
        """The last look; what was there before the launch, until there is one."""
        if self._holder is None or self._holder.seen is None:
            return self.before
        return self._holder.seen

    @property
    def newest(self) -> int | None:
        """The newest step that can be gone on from: held, or whole in the trainer's own folder."""
        steps = steps_of(self.seen)
        if self._holder is not None and self._holder.held is not None:
            steps = (*steps, self._holder.held)
        return max(steps, default=None)

    @property
    def complete(self) -> UnheldCheckpoint | None:
        """The newest one in the trainer's own folder that lacks nothing, be it of this moment."""
        if self.seen is None:
            return None
        found = [one for one in self.seen.found if one.is_complete and one.step is not None]
        if not found:
            return None
        newest = found[-1]
        assert newest.step is not None
        return UnheldCheckpoint(newest.step, newest.changed)

    @property
    def made(self) -> int | None:
        """The newest step of those that lack nothing and were not there when the launch began."""
        if self.seen is None:
            return None
        before = complete_of(self.before)
        return max(
            (
                one.step
                for one in self.seen.found
                if one.is_complete
                and one.step is not None
                and (one.name, one.changed) not in before
            ),
            default=None,
        )

    def prepare(self) -> TakenCheckpoint | None:
        """What the trainer has to go on from; None where there is nothing. Raises Refusal where a
        start would go wrong, LeaseLost, OSError.
        """
        place = self._place
        if place is None:
            return None
        point = prepare(place, self._fence, self._say)
        with suppress(FileNotFoundError):  # nothing was saved yet
            self.before = survey(place.rules, place.folder, place.ranks, time.time())
        if point is None:
            return None
        return TakenCheckpoint(point.step, str(point.path), point.name)

    def start(self) -> None:
        """Begin to look and to hold. Raises LeaseLost, OSError."""
        if self._place is not None:
            self._holder = Holder(self._place, self._fence, self._say)
            self._holder.start()

    def look(self) -> None:
        """Look now: after the trainer's end, for what it saved last."""
        if self._holder is not None:
            self._holder.finish(0.0)

    def finish(self, seconds: float) -> None:
        """Hold what can be held in so many seconds, and end; for the time after the trainer's. What is
        not finished the next launch goes on with.
        """
        if self._holder is not None:
            self._holder.finish(seconds)
            self._holder.stop()


def whole_of(seen: CheckpointSurvey | None) -> frozenset[tuple[str, float]]:
    """Name and moment of the last change of each whole checkpoint: which save it is."""
    if seen is None:
        return frozenset()
    return frozenset((one.name, one.changed) for one in seen.whole)


def complete_of(seen: CheckpointSurvey | None) -> frozenset[tuple[str, float]]:
    """The same of each that lacks nothing, also where it was written only a moment ago."""
    if seen is None:
        return frozenset()
    return frozenset((one.name, one.changed) for one in seen.found if one.is_complete)


def steps_of(seen: CheckpointSurvey | None) -> tuple[int, ...]:
    """The steps of all whole checkpoints that say theirs."""
    if seen is None:
        return ()
    return tuple(one.step for one in seen.whole if one.step is not None)


def changed_at(seen: CheckpointSurvey | None) -> float:
    """When any checkpoint was last written to, seconds since the epoch; 0.0 for never."""
    if seen is None:
        return 0.0
    return max((one.changed for one in seen.found), default=0.0)

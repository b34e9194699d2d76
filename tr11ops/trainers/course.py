"""Where a foreign training stands, by all that was heard and seen of it; and whether it began where
it had to. Pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from tr11ops.dialects.dialect import Ending, Mark
from tr11ops.trainers.log import LogReading
from tr11ops.trainers.start import TakenCheckpoint
from tr11ops.trainers.words import EndSeen, Heard, MarkSeen, StepSeen, TotalSeen
from trainer.contract.attempt import UnheldCheckpoint
from trainer.contract.record import Record

PHASE_OF: dict[Mark, str] = {
    "loading": "loading",
    "resumed": "training",
    "scratch": "training",
    "saving": "saving",
    "saved": "training",
    "evaluating": "evaluating",
}
# a first line of a step that is so little before it has gone on from a checkpoint: some count from 0
SLACK = 1


class TrainingCourse(Record):
    """What is known of one launch. `iteration`: steps done, as far as they were told; before any was,
    those of the checkpoint that it goes on from. `sign`: the last sign of the trainer's life, seconds
    since the epoch.

    `first`: the first step that was told for certain; `scratch`: whether it said that it begins with
    random weights; `saved`: its newest complete checkpoint, as node 0 sees it.
    """

    sign: float
    phase: str = "starting"
    iteration: int = 0
    total: int | None = None
    first: int | None = None
    has_stepped: bool = False
    scratch: bool = False
    resumed_at: int | None = None
    ending: Ending | None = None
    ending_line: str = ""
    saved: UnheldCheckpoint | None = None

    def after(self, heard: Heard, now: float) -> TrainingCourse:
        """With what one line said."""
        if isinstance(heard, StepSeen):
            return self._after_step(heard, now)
        if isinstance(heard, MarkSeen):
            return self._after_mark(heard, now)
        if isinstance(heard, TotalSeen):
            return replace(self, total=self.total or heard.total)
        assert isinstance(heard, EndSeen)
        return replace(self, ending=heard.means, ending_line=heard.line, sign=now)

    def seen_at(self, moment: float) -> TrainingCourse:
        """With a sign of life that is no line: a checkpoint that grows, another node's step."""
        if moment <= self.sign:
            return self
        return replace(self, sign=moment)

    def having_saved(self, saved: UnheldCheckpoint | None, made: int | None) -> TrainingCourse:
        """With the newest complete checkpoint, as it is now. `made`: the newest step of those that this
        launch has saved, which it has trained, whatever its lines tell.
        """
        course = replace(self, saved=saved)
        if made is None or made <= self.iteration:
            return course
        return replace(course, iteration=made, has_stepped=True)

    def at_step(self, iteration: int, moment: float, total: int | None = None) -> TrainingCourse:
        """As another node tells it, whose workers print the steps."""
        if total is not None and total != self.total:
            return replace(self, total=total).at_step(iteration, moment)
        if iteration == self.iteration:
            return self.seen_at(moment)
        phase = self.phase
        if phase in ("starting", "loading", "saving", "evaluating"):
            phase = "training"
        moved = replace(self, iteration=iteration, phase=phase, has_stepped=True)
        return moved.seen_at(moment)

    def spoken(self, step: StepSeen | None, phase: str | None, moment: float) -> TrainingCourse:
        """With a word of the trainer's own, which says more of the phase than a line does."""
        course = self
        if step is not None and step.iteration >= self.iteration:
            course = self._after_step(step, moment)
        if phase is not None:
            course = replace(course, phase=phase)
        return course.seen_at(moment)

    def log(self) -> LogReading:
        """The same as a log says it, for `meaning_of_end`."""
        last = self.iteration if self.has_stepped else None
        return LogReading(
            first=self.first,
            last=last,
            total=self.total,
            resumed_at=self.resumed_at,
            ending=self.ending,
            ending_line=self.ending_line,
        )

    @property
    def started_at(self) -> int | None:
        """The steps that were done when it began, by its own word, else by the first step it told."""
        if self.resumed_at is None and self.first is not None:
            return self.first - 1
        return self.resumed_at

    @property
    def is_finished(self) -> bool:
        """Whether it has reached its last step, as far as that is known."""
        return self.has_stepped and self.total is not None and self.iteration >= self.total

    def _after_step(self, step: StepSeen, now: float) -> TrainingCourse:
        first = self.first
        if first is None and (step.is_certain or "lm_loss" in step.values):
            first = step.iteration
        is_new = step.iteration != self.iteration or not self.has_stepped
        return replace(
            self,
            iteration=step.iteration,
            total=step.total or self.total,
            first=first,
            has_stepped=True,
            phase="training",
            # a bar that is drawn again tells nothing new
            sign=now if is_new else self.sign,
        )

    def _after_mark(self, seen: MarkSeen, now: float) -> TrainingCourse:
        course = replace(self, phase=PHASE_OF[seen.mark], sign=now)
        if seen.mark == "scratch":
            return replace(course, scratch=True)
        if seen.mark != "resumed" or seen.done is None:
            return course
        if course.has_stepped:
            return replace(course, resumed_at=seen.done)
        return replace(course, resumed_at=seen.done, iteration=seen.done)


def wrong_start(
    course: TrainingCourse, taken: TakenCheckpoint | None, whole: tuple[int, ...]
) -> str:
    """Why a launch has to be ended: it began with random weights, although it had a checkpoint. ""
    where that is not certain.

    `whole`: the steps of all whole checkpoints that were there before it. A first step that may have
    come of an older one of them is no proof.
    """
    if taken is None:
        return ""
    if course.scratch:
        return f"started from random weights although {taken} exists"
    told = course.started_at
    if told is None or taken.step is None or told >= taken.step - SLACK:
        return ""
    if any(step <= told + SLACK for step in whole):
        return ""
    return f"started from random weights although {taken} exists: its first step was {told + 1}"


def older_start(course: TrainingCourse, taken: TakenCheckpoint | None) -> str:
    """What to say of a launch that went on from an older checkpoint than the one it was to take; ""
    where it did not, as far as is known.
    """
    told = course.started_at
    if taken is None or taken.step is None or told is None or told >= taken.step - SLACK:
        return ""
    return f"it goes on from step {told}, although {taken} exists"


def nothing_left(course: TrainingCourse, taken: TakenCheckpoint | None, total: int | None) -> str:
    """Why a launch that took no step had none to take: its checkpoint is of the last one, as where the launch
    before was ended in that moment. "" where that is not so. `total`: the last step, as any launch told it.
    """
    last = course.total or total
    if course.has_stepped or taken is None or taken.step is None or last is None:
        return ""
    if taken.step < last:
        return ""
    return f"it took no step, as {taken} is of its last one"

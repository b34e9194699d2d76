"""The drill of a foreign trainer: it is asked to save and stop in order, in its own way, and what is
judged is what anyone would find afterwards: whether it left in time, whether a checkpoint is whole, and
whether the next launch went on from it.

All times are those at which the drill saw them, by its own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import known, observed
from tr11ops.cluster.base import Job, Scheduler
from tr11ops.dialects.settings import TrainerSettings
from tr11ops.observe.files import read_heartbeats, read_steps
from tr11ops.observe.jobs import own_jobs_now
from tr11ops.queue.stop import STOP_SIGNAL
from tr11ops.rundir.paths import RunDirectory
from tr11ops.trainers.checkpoints import CheckpointSurvey, FoundCheckpoint, survey
from tr11ops.trainers.kept_files import START_FILE, StartOrder
from tr11ops.trainers.proof import Result, StopProof
from tr11ops.trainers.saves import whole_of
from tr11ops.trainers.start_names import current_folder
from tr11ops.trainers.stopping import END, ORDER_FILE, StopOrder
from trainer.contract.attempt import EndMarker
from trainer.contract.documents import read_record
from trainer.contract.record import Record

SETTLE_SECONDS = 10.0  # after its end, beside what the dialect waits for
ORDER_SECONDS = 120.0  # from the signal to the batch script until the nodes have an order


class StopSight(Record):
    """What was seen of one stop. `asked`, `left`, `saved`: seconds since the drill asked for it; None for
    never. `iteration`: the step that it was at then. `checkpoint`: the newest that became whole since.
    """

    iteration: int
    how: str
    asked: float | None = None
    marker: EndMarker | None = None
    left: float | None = None
    checkpoint: FoundCheckpoint | None = None
    saved: float | None = None


class NextSight(Record):
    """What was seen of the launch that followed. `order`: what it has to go on from; `first_step`: the
    first one on record; `end`: how it ended, where it did.
    """

    job_id: str = ""
    order: StartOrder | None = None
    first_step: int | None = None
    end: EndMarker | None = None


def judge_stop(sight: StopSight, minutes: float, interval: int | None) -> tuple[Result, str]:
    """Whether a training saved and left in order within so many minutes; `proved` where it did. `interval`:
    the steps between two saves of its own, which prove nothing. Pure.
    """
    marker, saved = sight.marker, sight.checkpoint
    if sight.asked is None and marker is None:
        return "unclear", "its nodes gave no order to stop"
    if marker is not None and marker.reason != "signal":
        return "unclear", f"it left for another reason: {marker.reason} ({marker.message})"
    if marker is None:
        what = "saved nothing" if saved is None else f"saved {saved.name}"
        return "failed", f"it {what} and did not leave within {minutes:g} min"
    if saved is None:
        return "failed", f"it left at step {marker.iteration} without a whole checkpoint of it"
    if saved.step is not None and saved.step < sight.iteration:
        text = (
            f"its newest checkpoint is of step {saved.step}, and it was at step {sight.iteration}"
        )
        return "failed", text
    if interval and saved.step is not None and saved.step % interval == 0:
        return "unclear", f"a save was due at step {saved.step} in any case"
    return "proved", ""


def judge_next(sight: StopSight, after: NextSight) -> tuple[Result, str]:
    """Whether the next launch went on from what was saved. Pure."""
    saved = sight.checkpoint
    if after.end is not None and after.first_step is None:
        return "failed", f"the next launch did not train: {after.end.message}"
    if after.order is None or after.first_step is None:
        return "unclear", "no launch was seen to train after it"
    taken = after.order.taken
    if taken is None:
        return "failed", "the next launch began from scratch"
    if saved is not None and taken.name != saved.name:
        return "failed", f"the next launch went on from {taken.name}, not from {saved.name}"
    done = sight.iteration if taken.step is None else taken.step
    if after.first_step <= done:
        return (
            "failed",
            f"the next launch was given step {done} and trained step {after.first_step}",
        )
    return "proved", ""


@dataclass
class StopDrill:
    """Asks one training to stop, and watches it and the launch that follows. `say` gets a line at every
    change; `start_next` submits a launch where none is queued, None where one is.
    """

    directory: RunDirectory
    scheduler: Scheduler
    settings: TrainerSettings
    ranks: int
    minutes: float
    say: Callable[[str], None]
    start_next: Callable[[], None] | None = None
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep
    poll_seconds: float = 0.5
    _seen: CheckpointSurvey | None = field(default=None, init=False)

    def run(self, proof: StopProof, deadline: float) -> StopProof:
        """The whole drill, given up at `deadline` of the clock. `proof` is what is known before."""
        job = self._training_job(deadline)
        if job is None:
            return replace(proof, result="unclear", why="no training was seen that could be asked")
        before = frozenset(known(observed(self.directory.attempt_ids), []))
        sight = self._stop(job)
        result, why = judge_stop(sight, self.minutes, self.settings.checkpoint_interval)
        saved, marker = sight.checkpoint, sight.marker
        proof = replace(
            proof,
            result=result,
            why=why,
            job_id=job.raw_id,
            iteration=sight.iteration,
            signalled_after=sight.asked,
            checkpoint="" if saved is None else saved.name,
            checkpoint_step=None if saved is None else saved.step,
            saved_after=sight.saved,
            left_after=sight.left,
        )
        if marker is None:
            self._cancel(job)
        if result != "proved":
            return proof
        if self.start_next is not None:
            self.start_next()
        after = self._next(before, deadline)
        result, why = judge_next(sight, after)
        return replace(
            proof, result=result, why=why, next_job=after.job_id, went_on_at=after.first_step
        )

    # ------------------------------------------------------------------ until it can be asked
    def _training_job(self, deadline: float) -> Job | None:
        """The job that trains, once it has trained a step that is not saved."""
        said = False
        while self.clock() < deadline:
            with suppress(SchedulerError):
                for job in own_jobs_now(self.directory, self.scheduler):
                    if job.state.is_active and self._has_something_to_save(job):
                        return job
            if not said:
                said = True
                self.say("waiting for a step that is not saved yet")
            self.pause(self.poll_seconds)
        return None

    def _has_something_to_save(self, job: Job) -> bool:
        step = self._step_of(job.raw_id)
        interval = self.settings.checkpoint_interval
        if not step or (interval and step % interval == 0):
            return False
        saved = [one.step for one in self._whole() if one.step is not None]
        return step > max(saved, default=0)

    def _step_of(self, attempt: str) -> int:
        """The newest step of an attempt that is on record; 0 for none."""
        steps = known(read_steps(self.directory.paths), ())
        own = [step.record.iteration for step in steps if step.job_id == attempt]
        return max(own, default=0)

    # ------------------------------------------------------------------ the stop
    def _stop(self, job: Job) -> StopSight:
        old = whole_of(self._look())
        folder = self.directory.paths.attempt(job.raw_id)
        began = self.clock()
        sight = StopSight(self._step_of(job.raw_id), "")
        if not self._ask(job):
            return sight
        self.say(f"job {job.job_id}: asked to save and leave at step {sight.iteration}")
        patience = 60 * self.minutes
        while self.clock() - began < patience + SETTLE_SECONDS:
            now = self.clock() - began
            if sight.asked is None and self._is_signalled(folder):
                sight = replace(sight, asked=now)
                self.say(f"signalled after {now:.1f} s")
            self._look()
            new = [one for one in self._whole() if (one.name, one.changed) not in old]
            if new and (sight.checkpoint is None or new[-1].name != sight.checkpoint.name):
                sight = replace(sight, checkpoint=new[-1], saved=now)
                self.say(f"{new[-1].name} is whole after {now:.1f} s")
            marker = known(observed(EndMarker.read, folder / "end.json"), None)
            if sight.marker is None and marker is not None and now <= patience:
                sight = replace(sight, marker=marker, left=now)
                self.say(f"left after {now:.1f} s: {marker.reason}")
            if self._is_over(sight, now):
                break
            self.pause(self.poll_seconds)
        return sight

    def _is_over(self, sight: StopSight, now: float) -> bool:
        """Whether nothing more is to be seen of the stop."""
        if sight.left is None:
            is_late = sight.asked is None and now > ORDER_SECONDS
            return is_late or now > 60 * self.minutes
        rules = self.settings.dialect.checkpoints
        quiet = 0.0 if rules is None else rules.quiet
        return sight.checkpoint is not None or now > sight.left + quiet + SETTLE_SECONDS

    def _ask(self, job: Job) -> bool:
        try:
            self.scheduler.signal(job.job_id, STOP_SIGNAL)
        except SchedulerError as error:
            self.say(f"the signal could not be sent: {error}")
            return False
        return True

    def _is_signalled(self, folder: Path) -> bool:
        """Whether the order to save and leave is there, and its moment has come."""
        order = known(observed(read_record, StopOrder, folder / ORDER_FILE, "an order"), None)
        return order is not None and order.how != END and self.clock() >= order.moment

    def _look(self) -> CheckpointSurvey | None:
        """Look at the trainer's folder; what was seen before where it cannot be read now."""
        rules, folder = self.settings.dialect.checkpoints, current_folder(self.settings)
        if rules is not None and folder is not None:
            with suppress(OSError):
                self._seen = survey(rules, folder, self.ranks, self.clock(), before=self._seen)
        return self._seen

    def _whole(self) -> tuple[FoundCheckpoint, ...]:
        if self._seen is None:
            self._look()
        return () if self._seen is None else self._seen.whole

    def _cancel(self, job: Job) -> None:
        self.say(f"job {job.job_id} has not left, and is cancelled")
        try:
            self.scheduler.cancel(job.job_id)
        except SchedulerError as error:
            self.say(f"it could not be cancelled: {error}")

    # ------------------------------------------------------------------ the launch after it
    def _next(self, before: frozenset[str], deadline: float) -> NextSight:
        self.say("waiting for the next launch")
        seen = NextSight()
        while self.clock() < deadline:
            for attempt in self._new_attempts(before):
                seen = self._see_next(attempt)
                if seen.first_step is not None or seen.end is not None:
                    return seen
            self.pause(self.poll_seconds)
        return seen

    def _new_attempts(self, before: frozenset[str]) -> list[str]:
        """Those that came since, and have a trainer: the newest last."""
        now = known(observed(self.directory.attempt_ids), [])
        beats = known(read_heartbeats(self.directory.paths)[0], ())
        living = {beat.job_id for beat in beats}
        return [one for one in now if one not in before and one in living]

    def _see_next(self, attempt: str) -> NextSight:
        folder = self.directory.paths.attempt(attempt)
        steps = known(read_steps(self.directory.paths), ())
        own = [step.record.iteration for step in steps if step.job_id == attempt]
        return NextSight(
            attempt,
            known(observed(read_record, StartOrder, folder / START_FILE, "a start"), None),
            first_step=own[0] if own else None,
            end=known(observed(EndMarker.read, folder / "end.json"), None),
        )

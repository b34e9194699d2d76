"""When the training saves, and what happens when a save fails: it goes on, and everyone knows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.checkpoint import randomness
from trainer.checkpoint.deepspeed.collective import save_deepspeed
from trainer.checkpoint.deepspeed.content import OptimizerSettings
from trainer.checkpoint.publishing import Extras, Finished, NewCheckpoint
from trainer.checkpoint.writer import AsyncSaver, Failed, Outcome
from trainer.config.data_match import CURSOR_KEY
from trainer.contract.documents import document
from trainer.contract.errors import CheckpointError, NotFiniteError, lost_a_rank
from trainer.contract.metrics_record import SAVE_FAILED
from trainer.contract.origin import ORIGIN_KEY, BranchOrigin
from trainer.contract.record import JsonObject
from trainer.contract.resumable import OPTIMIZER_SUMS
from trainer.control.exits import FailedSaves
from trainer.control.lifecycle import Worker
from trainer.control.resume import BY_PLACE, MASKS_KEY, checkpoint_info, drops
from trainer.engine import Engine
from trainer.parallel.state import ShardedState
from trainer.schedule.learning_rate import LearningRatePlan
from trainer.schedule.path import Progress
from trainer.schedule.start import optimizer_facts


class Saver:
    """Saves this run's checkpoints. `save`, `poll` and `wait` are collective.

    `saved_step` is the newest complete checkpoint that is known of; one that is still being written
    is not. The worker's fence is asked before anything is published, see
    `trainer.checkpoint.publishing.publish`. `data`: see `trainer.config.data_match`. `note`: told
    of each failed save, for those who watch. `origin`: kept in each of them.
    """

    def __init__(
        self,
        worker: Worker,
        engine: Engine,
        saved_step: int | None,
        card_hash: str,
        data: Mapping[str, Any] | None = None,
        note: Callable[[str, Mapping[str, Any]], None] | None = None,
        origin: BranchOrigin | None = None,
    ):
        self.saved_step = saved_step
        self._config, self._mesh, self._engine, self._say = (
            engine.config,
            engine.mesh,
            engine,
            worker.say,
        )
        self._info = checkpoint_info(engine.config, engine.mesh, card_hash, worker.attempt.job_id)
        self._fence = worker.fence
        self._writer = AsyncSaver(
            worker.paths.checkpoints,
            worker.say,
            engine.mesh.cpu_group,
            fence=worker.fence,
            is_held=True,
        )
        engine.before_update(self._writer.hold)
        self._data = data
        self._note = note
        self._origin = origin
        self._failed: list[int] = []
        # how each save that is told of ended
        if saved_step is None:
            self._ended = {}
        else:
            self._ended = {saved_step: True}
        self._fault: CheckpointError | None = None
        self.failed_saves = FailedSaves()  # in a row, on one node alone
        self._last_save = worker.clock()

    @property
    def in_flight(self) -> int | None:
        """The step that is being saved in the background."""
        return self._writer.in_flight

    def was_saved(self, step: int) -> bool | None:
        """Whether the save of a step came about; None where it has not ended, or was not tried."""
        return self._ended.get(step)

    def minutes_are_over(self, now: float) -> bool:
        """Whether `checkpoint.interval_minutes` have passed since the last save began (or since the
        start).
        """
        minutes = self._config.checkpoint.interval_minutes
        return minutes is not None and now - self._last_save >= minutes * 60

    def went_back_to(self, step: int) -> None:
        """The training has gone back to its own checkpoint of `step`."""
        self.saved_step, self._ended = step, {step: True}

    def reserve(self) -> None:
        """Begin to get the memory for saves in the background, for which the first would stand
        still. Collective.
        """
        settings = self._config.checkpoint
        if settings.asynchronous and settings.format != "deepspeed":
            self._writer.reserve(
                self._engine.sharded_state(), save_optimizer=settings.save_optimizer
            )

    def save(self, progress: Progress, plan: LearningRatePlan, now: float) -> float:
        """Save this iteration unless it is saved; returns the seconds that the training stood
        still. Collective.

        A save that cannot be written (disk full, no rights) is told and remembered; the older
        checkpoints are then untouched, all ranks know the same, and the training may go on. Raises
        RuntimeError when copies of a parameter differ between ranks, NotFiniteError when a weight
        or moment is NaN or infinite, CheckpointError when a rank was lost.
        """
        self._last_save = now
        step = progress.iteration
        if step in {0, self.saved_step, self._writer.in_flight}:
            return 0.0
        began = time.perf_counter()
        drifted = self._engine.disagreeing_parameters()
        if drifted:
            raise RuntimeError(
                f"copies of these parameters differ between ranks, so nothing was saved: {', '.join(drifted)}"
            )
        state = self._engine.sharded_state()
        broken = self._engine.not_finite(state)
        if broken:
            if self.saved_step is None:
                newest = "no checkpoint"
            else:
                newest = f"step {self.saved_step}"
            raise NotFiniteError(
                f"nothing was saved at iteration {step}: not finite are {len(broken)} parameters, the first "
                f"{broken[0]}; the newest to resume from is {newest}"
            )
        settings = self._config.checkpoint
        self._say(f"saving checkpoint at iteration {step:7d} to {self._config.paths.checkpoints}")
        if settings.format == "deepspeed":
            self._tell(self._writer.wait())
            self._tell([self._save_original_layout(state, progress, plan)])
            return time.perf_counter() - began
        extras = self._extras(progress, plan)
        keeps = settings.save_optimizer
        if settings.asynchronous:
            self._writer.start(step, state, extras, self._info, save_optimizer=keeps)
        else:
            self._tell(self._writer.save_now(step, state, extras, self._info, save_optimizer=keeps))
        return time.perf_counter() - began

    def poll(self) -> None:
        """After a step: tell how a save in the background has ended. Costs nothing while none is
        under way.
        """
        outcome = self._writer.poll()
        if outcome is not None:
            self._tell([outcome])

    def wait(self) -> CheckpointError | None:
        """Let the save that is under way end; the fault of the newest one, if it failed.
        Collective.
        """
        self._tell(self._writer.wait())
        return self._fault

    def close(self) -> None:
        """Release memory and thread; a save that is under way is abandoned."""
        self._writer.close()

    def _save_original_layout(
        self, state: ShardedState, progress: Progress, plan: LearningRatePlan
    ) -> Outcome:
        try:
            new = NewCheckpoint(
                self._config.paths.checkpoints,
                progress.iteration,
                self._extras(progress, plan),
                self._info,
                fence=self._fence,
                report=self._say,
            )
            return save_deepspeed(
                new,
                state,
                self._mesh,
                settings=self._settings(progress, plan),
                save_optimizer=self._config.checkpoint.save_optimizer,
                group=self._mesh.cpu_group,
            )
        except CheckpointError as fault:
            if lost_a_rank(fault):
                raise
            return Failed(progress.iteration, fault)

    def _settings(self, progress: Progress, plan: LearningRatePlan) -> OptimizerSettings:
        section = self._config.optimizer
        return OptimizerSettings(
            plan.at(progress.scheduled_samples, progress.scheduled_tokens),
            section.beta1,
            section.beta2,
            epsilon=section.epsilon,
            weight_decay=section.weight_decay,
            clip_grad=section.clip_grad,
        )

    def _extras(self, progress: Progress, plan: LearningRatePlan) -> Extras:
        cursor: JsonObject = {
            **document(progress),
            "schedule": plan.facts(),
            "optimizer": optimizer_facts(self._config),
            "loss_scaler": self._engine.scaler_state(),
        }
        sums = self._engine.optimizer_sums()
        if sums:
            cursor[OPTIMIZER_SUMS] = sums
        if drops(self._config):
            cursor[MASKS_KEY] = BY_PLACE
        if self._data is not None:
            cursor[CURSOR_KEY] = self._data
        if self._origin is not None:
            cursor[ORIGIN_KEY] = document(self._origin)
        if self._config.checkpoint.save_random_state:
            return Extras(cursor=cursor, rng=randomness.capture())
        return Extras(cursor=cursor, rng={})

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Finished):
                self._succeeded(outcome)
            else:
                self._failed_at(outcome)

    def _succeeded(self, save: Finished) -> None:
        self.saved_step, self._fault, self._ended[save.step] = save.step, None, True
        self.failed_saves = FailedSaves()
        self._say(
            f"  successfully saved checkpoint at iteration {save.step:7d} to {self._config.paths.checkpoints}"
        )
        stall = ""
        if save.stall < save.seconds:
            stall = f" (the training stood still for {save.stall * 1000:.2f})"
        self._say(f"time (ms) | save-checkpoint: {save.seconds * 1000:.2f}{stall}")
        if self._failed:  # said again: where the disk was full, the log could not take the warning
            missing = ", ".join(map(str, self._failed))
            self._say(
                f"tr11: WARNING: saves failed before this one, at iteration {missing}; they work again"
            )
            self._failed.clear()

    def _failed_at(self, save: Failed) -> None:
        if self.saved_step is None:
            newest = "there is none yet"
        else:
            newest = f"the newest is of step {self.saved_step}"
        self._fault, self._ended[save.step] = save.fault, False
        self._failed.append(save.step)
        self._say(f"tr11: WARNING: SAVE FAILED at iteration {save.step}, {newest}: {save.fault}")
        self.failed_saves = self.failed_saves.after(save.step, save.fault)
        if self._note is not None:
            self._note(SAVE_FAILED, self.failed_saves.event(save.step, save.fault))
        if self.failed_saves.node and not self.failed_saves.unable:
            self._say(
                f"tr11: WARNING: {self.failed_saves}: if the next fails there too, the training leaves that node"
            )

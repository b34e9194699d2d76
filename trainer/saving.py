"""When the training saves, and what happens when a save fails: it goes on, and everybody knows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from trainer.checkpoint import randomness, store
from trainer.checkpoint.catalogue import CheckpointError
from trainer.checkpoint.store import Extras
from trainer.config import TrainerConfig
from trainer.engine import Engine
from trainer.learning_rate import LearningRatePlan
from trainer.mesh import Mesh
from trainer.progress import Progress
from trainer.resume import checkpoint_info, optimizer_facts


class Saver:
    """Saves this run's checkpoints. `save` and `wait` are collective; `saved_step` is the newest that is complete."""

    def __init__(
        self,
        config: TrainerConfig,
        mesh: Mesh,
        engine: Engine,
        say: Callable[[str], None],
        saved_step: int | None,
        card_hash: str,
        job_id: str,
        now: float,
    ):
        self.saved_step = saved_step
        self._config, self._mesh, self._engine, self._say = config, mesh, engine, say
        self._info = checkpoint_info(config, mesh, card_hash, job_id)
        self._failed: list[int] = []
        self._fault: CheckpointError | None = None
        self._last_save = now

    def minutes_are_over(self, now: float) -> bool:
        """Whether `checkpoint.interval_minutes` have passed since the last save began (or since the start)."""
        minutes = self._config.checkpoint.interval_minutes
        return minutes is not None and now - self._last_save >= minutes * 60

    def went_back_to(self, step: int) -> None:
        """The training has gone back to its own checkpoint of `step`."""
        self.saved_step = step

    def save(self, progress: Progress, plan: LearningRatePlan, now: float) -> float:
        """Save this iteration unless it is saved; returns the seconds that the training stood still. Collective.

        A save that cannot be written (disk full, no rights) is told and remembered; the older checkpoints are then
        untouched, all ranks know the same, and the training may go on. Raises RuntimeError when copies of a parameter
        differ between ranks, CheckpointError when a rank was lost.
        """
        self._last_save = now
        if progress.iteration in {0, self.saved_step}:
            return 0.0
        began = time.perf_counter()
        drifted = self._engine.disagreeing_parameters()
        if drifted:
            raise RuntimeError(
                f"copies of these parameters differ between ranks, so nothing was saved: {', '.join(drifted)}"
            )
        folder, step = self._config.paths.checkpoints, progress.iteration
        self._say(f"saving checkpoint at iteration {step:7d} to {folder}")
        try:
            result = store.save(
                folder,
                step,
                self._engine.sharded_state(),
                self._extras(progress, plan),
                self._info,
                group=self._mesh.cpu_group,
            )
        except CheckpointError as fault:
            self._failed_at(step, fault)
        else:
            self._succeeded(step, result.seconds)
        return time.perf_counter() - began

    def wait(self) -> CheckpointError | None:
        """Let every save that is under way end; the fault of the newest one, if it failed. Collective."""
        return self._fault

    def close(self) -> None:
        """Release what the saver holds."""

    def _extras(self, progress: Progress, plan: LearningRatePlan) -> Extras:
        cursor = {
            **asdict(progress),
            "schedule": plan.facts(),
            "optimizer": optimizer_facts(self._config),
            "loss_scaler": self._engine.scaler_state(),
        }
        return Extras(cursor=cursor, rng=randomness.capture() if self._config.checkpoint.save_random_state else {})

    def _succeeded(self, step: int, seconds: float) -> None:
        self.saved_step, self._fault = step, None
        self._say(f"  successfully saved checkpoint at iteration {step:7d} to {self._config.paths.checkpoints}")
        self._say(f"time (ms) | save-checkpoint: {seconds * 1000:.2f}")
        if self._failed:  # said again: where the disk was full, the log could not take the warning
            missing = ", ".join(map(str, self._failed))
            self._say(f"tr11: WARNING: saves failed before this one, at iteration {missing}; they work again")
            self._failed.clear()

    def _failed_at(self, step: int, fault: CheckpointError) -> None:
        if isinstance(fault.__cause__, RuntimeError):
            raise fault  # a rank was lost: there is nothing to go on with
        newest = "there is none yet" if self.saved_step is None else f"the newest is of step {self.saved_step}"
        self._fault = fault
        self._failed.append(step)
        self._say(f"tr11: WARNING: SAVE FAILED at iteration {step}, {newest}: {fault}")

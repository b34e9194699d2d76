"""Spikes in a running training: seen by all ranks alike, decided by rank 0, remembered in the run directory."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from trainer.checkpoint.publishing import Fence
from trainer.config.card import TrainerConfig
from trainer.contract.errors import CheckpointError
from trainer.contract.files import now
from trainer.contract.paths import RunPaths
from trainer.contract.recovery import RecoveryRecord, RollBack, read_recovery, write_recovery
from trainer.contract.rollback import complete_steps, finish, moves_of, settle
from trainer.engine import StepResult
from trainer.parallel.agreement import RankGroup
from trainer.schedule.skip import SkipPlan
from trainer.spikes.detect import DroppedSteps, Flag, SpikeDetector, decide_recovery


class SpikeWatch:
    """Looks at the numbers of every step, and says what to do about a spike. `decide` and `roll_back` are collective.

    Raises CheckpointError when the record of earlier roll-backs cannot be read: what they skipped would come again.
    """

    def __init__(self, config: TrainerConfig, group: dist.ProcessGroup | None):
        self._config = config
        self._ranks = RankGroup(group)
        self._detector = SpikeDetector.of(config.recovery)
        self._dropped = DroppedSteps(config.recovery.dropped_steps)
        self.record = self._ranks.on_first("roll-backs of this run", _read, config.paths)

    @property
    def skips(self) -> SkipPlan:
        """What the card and the roll-backs pass over."""
        return SkipPlan.of(self._config, self.record.ranges)

    def observe(
        self,
        iteration: int,
        loss: float,
        grad_norm: float | None,
        skipped: bool,
        finish_saves: Callable[[], object] = lambda: None,
    ) -> RollBack | Flag | None:
        """Take one step's numbers, the same on all ranks; returns what is to be done, if anything. Collective then.

        `finish_saves` is called before a checkpoint to go back to is looked for: one that is still being written in the
        background may be the newest from before the spike. Collective too.
        """
        settings = self._config.recovery
        if settings.on_spike == "off":
            return None
        self._detector, spike = self._detector.observe(iteration, loss, grad_norm, skipped)
        if spike is None:
            return None
        if settings.on_spike == "roll_back":
            finish_saves()
        folder, used = self._config.paths.checkpoints, self.record.automatic
        return self._ranks.on_first(
            "the search for a checkpoint before the spike",
            lambda: decide_recovery(spike, used, self.record.usable(complete_steps(folder)), settings),
        )

    def roll_back(self, action: RollBack, fence: Fence | None = None) -> None:
        """Remember the roll-back, then take the checkpoints that it discards out of every restart's way. Collective.

        `fence` is asked first, on rank 0: what another trainer reads by now must not be renamed.
        """
        paths, before = self._config.paths, self.record

        def change() -> RecoveryRecord:
            ask = fence or (lambda: None)
            ask()
            moves = moves_of(paths.checkpoints, action.spike.first_sign, action.skip.last)
            record = before.with_roll_back(action, now(), moves)
            write_recovery(paths, record)
            return finish(paths, record, ask)

        self.record = self._ranks.on_first(f"the roll-back to step {action.to_step} could not be prepared", change)
        self._detector = self._detector.over()
        self._dropped = DroppedSteps(self._config.recovery.dropped_steps)

    def count_dropped(self, iteration: int, result: StepResult, saved_step: int | None) -> None:
        """Take one step's numbers. Raises NotFiniteError when too many steps in a row changed nothing."""
        self._dropped = self._dropped.after(result.loss, result.grad_norm, result.skipped)
        self._dropped.check(iteration, saved_step)

    def settle(self) -> None:
        """At the start of an attempt: finish what a roll-back that was cut off began. Collective."""
        paths, record = self._config.paths, self.record
        self.record = self._ranks.on_first("discarded checkpoints", settle, paths, record)


def _read(paths: RunPaths) -> RecoveryRecord:
    try:
        return read_recovery(paths)
    except ValueError as error:
        raise CheckpointError(str(error)) from None

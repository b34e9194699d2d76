"""Spikes in a running training: seen by all ranks alike, decided by rank 0, remembered in the run
directory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median

import torch.distributed as dist
from msgspec.structs import replace

from trainer.checkpoint.publishing import Fence
from trainer.config.card import RecoverySection, TrainerConfig
from trainer.contract.errors import CheckpointError, NotFiniteError
from trainer.contract.files import now
from trainer.contract.paths import RunPaths
from trainer.contract.record import IterationRange, Record
from trainer.contract.recovery import (
    RecoveryRecord,
    RollBack,
    Spike,
    SpikeKind,
    complete_steps,
    finish,
    moves_of,
    read_recovery,
    settle,
    write_recovery,
)
from trainer.engine import StepResult
from trainer.parallel.agreement import RankGroup
from trainer.schedule.path import SkipPlan

# Loss spikes: seen in the numbers of each step, answered by a flag or by going back and passing
# over data. Pure.
#
# The rule is the one that separates the spike of April 2022 in the 176B training from its noise: a
# gradient norm above ten times its running median in two consecutive steps (it came two steps
# before the loss moved), or a loss above twice its median; and whatever is not finite.

CONSECUTIVE_NORMS = 2  # high gradient norms in a row that make a spike; a single one is noise
# non-finite steps in a row, each dropped by the optimizer, that are more than a hiccup
LASTING_SKIPS = 3
LEARNING_STEPS = 10  # steps seen before a median means anything
CALM_STEPS = 10  # ordinary steps in a row that end a spike


class DroppedSteps(Record):
    """Steps in a row that changed nothing, because their numbers were not finite: how many, and how
    many may be.

    `most` is 0 where they are not counted.
    """

    most: int
    count: int = 0

    def after(self, loss: float, grad_norm: float | None, skipped: bool) -> DroppedSteps:
        """Take one step's numbers. A step counts when its update was dropped, or should have been."""
        is_finite = math.isfinite(loss) and (grad_norm is None or math.isfinite(grad_norm))
        if is_finite and not skipped:
            return replace(self, count=0)
        return replace(self, count=self.count + 1)

    def check(self, iteration: int, saved_step: int | None) -> None:
        """Raises NotFiniteError when there are too many."""
        if self.most and self.count >= self.most:
            if saved_step is None:
                newest = "no checkpoint"
            else:
                newest = f"step {saved_step}"
            raise NotFiniteError(
                f"the last {self.count} steps, up to iteration {iteration}, were not finite and changed nothing "
                f"(recovery.dropped_steps = {self.most}); nothing was saved, the newest to resume from is {newest}"
            )


class SpikeDetector(Record):
    """Everything the rule remembers; `observe` gives the next one. A new attempt starts with an
    empty one.

    High values are not learnt, so a spike does not lift the median it is measured by. A level that
    stays high for more than `window` steps is no spike: the medians are then learnt again.
    """

    settings: RecoverySection
    norms: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    high_norms: int = 0  # in a row, up to now
    dropped: int = 0  # non-finite steps in a row whose update was dropped
    first_sign: int | None = None  # of the present spike, or of what may become one
    calm: int = 0
    told: frozenset[tuple[SpikeKind, bool]] = frozenset()

    def observe(
        self, iteration: int, loss: float, grad_norm: float | None, update_dropped: bool = False
    ) -> tuple[SpikeDetector, Spike | None]:
        """Take one step's numbers. Returns a spike when it is first seen, and again when it shows
        in another way.

        `update_dropped`: the optimizer skipped this step. With a finite loss that is the loss scale
        of fp16 at work, and no sign of anything.
        """
        if update_dropped and math.isfinite(loss):
            return self, None
        if not math.isfinite(loss) or (grad_norm is not None and not math.isfinite(grad_norm)):
            return self._not_finite(iteration, loss, grad_norm, update_dropped)
        usual_norm = _median(self.norms)
        usual_loss = _median(self.losses)
        high_norm = grad_norm is not None and grad_norm > self.settings.gradient_factor * usual_norm
        high_loss = loss > self.settings.loss_factor * usual_loss
        after = self._learn(None if high_norm else grad_norm, None if high_loss else loss)
        after = replace(after, high_norms=self.high_norms + 1 if high_norm else 0, dropped=0)
        if not high_norm and not high_loss:
            return after._settle(), None
        after = after._sign(iteration)
        if high_loss:
            return after._tell(iteration, "loss", loss, usual_loss)
        if after.high_norms >= CONSECUTIVE_NORMS:
            assert grad_norm is not None
            return after._tell(iteration, "gradient norm", grad_norm, usual_norm)
        return after, None

    def over(self) -> SpikeDetector:
        """The detector after a roll-back: the spike is forgotten, the medians from before it are
        kept.
        """
        return replace(self, high_norms=0, dropped=0, first_sign=None, calm=0, told=frozenset())

    def _not_finite(
        self, iteration: int, loss: float, grad_norm: float | None, update_dropped: bool
    ) -> tuple[SpikeDetector, Spike | None]:
        after = replace(self._sign(iteration), dropped=self.dropped + 1, high_norms=0)
        if grad_norm is None or not math.isfinite(loss):
            value = loss
        else:
            value = grad_norm
        lasting = not update_dropped or after.dropped >= LASTING_SKIPS
        return after._tell(iteration, "not finite", value, math.nan, lasting)

    def _sign(self, iteration: int) -> SpikeDetector:
        """Note an extraordinary step; one that lasts longer than the window is the new ordinary."""
        first = iteration if self.first_sign is None else self.first_sign
        if iteration - first > self.settings.window:
            return replace(self.over(), norms=(), losses=())
        return replace(self, first_sign=first, calm=0)

    def _settle(self) -> SpikeDetector:
        """After an ordinary step: a sign that was not followed is forgotten at once, a spike after
        some calm.
        """
        if self.first_sign is None:
            return self
        calm = self.calm + 1
        if not self.told or calm >= CALM_STEPS:
            return self.over()
        return replace(self, calm=calm)

    def _learn(self, grad_norm: float | None, loss: float | None) -> SpikeDetector:
        if grad_norm is None:
            norms = self.norms
        else:
            norms = (*self.norms, grad_norm)[-self.settings.window :]
        if loss is None:
            losses = self.losses
        else:
            losses = (*self.losses, loss)[-self.settings.window :]
        return replace(self, norms=norms, losses=losses)

    def _tell(
        self, iteration: int, kind: SpikeKind, value: float, usual: float, lasting: bool = True
    ) -> tuple[SpikeDetector, Spike | None]:
        """Report each kind once in a spike."""
        if self.first_sign is None or (kind, lasting) in self.told:
            return self, None
        spike = Spike(
            iteration, kind, value, median=usual, first_sign=self.first_sign, lasting=lasting
        )
        return replace(self, told=self.told | {(kind, lasting)}), spike


def _median(values: tuple[float, ...]) -> float:
    """NaN, above which nothing is high, until there are enough values."""
    if len(values) >= LEARNING_STEPS:
        return median(values)
    return math.nan


# ----------------------------------------------------------------------------- what to do about it
class Flag(Record):
    """Say that there is a spike, and train on. `why` is given where a roll-back was wanted and
    cannot be.
    """

    spike: Spike
    why: str = ""

    @property
    def line(self) -> str:
        return self.spike.line + (f" (no roll-back: {self.why})" if self.why else "")


def decide_recovery(
    spike: Spike, used_roll_backs: int, usable_steps: Iterable[int], settings: RecoverySection
) -> RollBack | Flag:
    """What to do about a spike, for `on_spike` "flag" or "roll_back".

    `usable_steps`: complete checkpoints of this run, without those that an earlier roll-back
    discarded. The newest one from before the first sign is gone back to. Skipped are the iterations
    from the first sign to the detection, and `skip_margin` more on each side.
    """
    if settings.on_spike != "roll_back":
        return Flag(spike)
    if not spike.lasting:
        return Flag(spike, "the weights were not touched")
    if used_roll_backs >= settings.roll_backs:
        return Flag(spike, f"all {settings.roll_backs} of recovery.roll_backs are used")
    before = [step for step in usable_steps if step < spike.first_sign]
    if not before:
        return Flag(
            spike, f"no checkpoint is older than its first sign at iteration {spike.first_sign}"
        )
    step = max(before)
    first = max(step + 1, spike.first_sign - settings.skip_margin)
    return RollBack(spike, step, IterationRange(first, spike.iteration + settings.skip_margin))


class SpikeWatch:
    """Looks at the numbers of every step, and says what to do about a spike. `decide` and
    `roll_back` are collective.

    Raises CheckpointError when the record of earlier roll-backs cannot be read: what they skipped
    would come again.
    """

    def __init__(self, config: TrainerConfig, group: dist.ProcessGroup | None):
        self._config = config
        self._ranks = RankGroup(group)
        self._detector = SpikeDetector(config.recovery)
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
        """Take one step's numbers, the same on all ranks; returns what is to be done, if anything.
        Collective then.

        `finish_saves` is called before a checkpoint to go back to is looked for: one that is still
        being written in the background may be the newest from before the spike. Collective too.
        """
        settings = self._config.recovery
        if settings.on_spike == "off":
            return None
        self._detector, spike = self._detector.observe(iteration, loss, grad_norm, skipped)
        if spike is None:
            return None
        if settings.on_spike == "roll_back":
            finish_saves()
        folder = self._config.paths.checkpoints
        used = self.record.automatic
        return self._ranks.on_first(
            "the search for a checkpoint before the spike",
            lambda: decide_recovery(
                spike, used, self.record.usable(complete_steps(folder)), settings
            ),
        )

    def roll_back(self, action: RollBack, fence: Fence | None = None) -> None:
        """Remember the roll-back, then take the checkpoints that it discards out of every restart's
        way. Collective.

        `fence` is asked first, on rank 0: what another trainer reads by now must not be renamed.
        """
        paths = self._config.paths
        before = self.record

        def change() -> RecoveryRecord:
            ask = fence or (lambda: None)
            ask()
            moves = moves_of(paths.checkpoints, action.spike.first_sign, action.skip.last)
            record = before.with_roll_back(action, now(), moves)
            write_recovery(paths, record)
            return finish(paths, record, ask)

        self.record = self._ranks.on_first(
            f"the roll-back to step {action.to_step} could not be prepared", change
        )
        self._detector = self._detector.over()
        self._dropped = DroppedSteps(self._config.recovery.dropped_steps)

    def count_dropped(self, iteration: int, result: StepResult, saved_step: int | None) -> None:
        """Take one step's numbers. Raises NotFiniteError when too many steps in a row changed
        nothing.
        """
        self._dropped = self._dropped.after(result.loss, result.grad_norm, result.skipped)
        self._dropped.check(iteration, saved_step)

    def settle(self) -> None:
        """At the start of an attempt: finish what a roll-back that was cut off began. Collective."""
        paths = self._config.paths
        record = self.record
        self.record = self._ranks.on_first("discarded checkpoints", settle, paths, record)


def _read(paths: RunPaths) -> RecoveryRecord:
    try:
        return read_recovery(paths)
    except ValueError as error:
        raise CheckpointError(str(error)) from None

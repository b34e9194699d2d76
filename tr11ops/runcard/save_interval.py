"""How often a launch saves, from the faults that the run has met and what its saves cost. Pure.

Decided before each launch, from its run's own record, and then the same for all its workers until it
ends. The card's own interval is never exceeded: other saves come between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

from tr11ops.base.units import duration
from tr11ops.runcard.exit_duration import save_seconds
from tr11ops.runcard.kinds import OwnCard, RunCard
from tr11ops.runcard.speed import RunHistory
from trainer.contract.record import Record
from trainer.schedule import flops

PRIOR_GPU_HOURS = 64_500.0  # between faults: BLOOM lost about one of 384 GPUs a week
RECENT_SECONDS = 7 * 86_400.0  # in which faults that come in bursts count for themselves
FEWEST_RECENT = 2
LEAST_SECONDS = 60.0
WRITTEN_SHARE = 0.1  # most of the time in which a checkpoint is being written
ROOM_SHARE = 0.5  # most of the free room that is filled until old checkpoints are removed
# Of a save in the background, the worst that was measured of its standstill by the time of a
# synchronous one; taken until the run has saved.
BACKGROUND_SHARE = 0.13


class FaultRecord(Record):
    """What a run has met: `seconds` of its launches, and the moments (seconds since the epoch) of
    faults that ended one which had trained.
    """

    seconds: float = 0.0
    faults: tuple[float, ...] = ()


class SaveInterval(Record):
    """A save so many minutes after the one before has begun, and why; None: as the card says."""

    minutes: float | None
    why: str

    def __str__(self) -> str:
        often = "as often as its card says"
        if self.minutes is not None:
            often = f"every {self.minutes:g} min"
        return f"the training saves {often}: {self.why}"


def adapts(card: RunCard) -> TypeGuard[OwnCard]:
    """Whether a card has its launches save as often as its run's faults call for."""
    return isinstance(card, OwnCard) and card.resilience.adapt_save_interval


def chosen_interval(
    card: RunCard, history: RunHistory, met: FaultRecord, free_bytes: int | None, now: float
) -> SaveInterval | None:
    """How often a launch that begins `now` saves; None where its card does not have it choose. The
    card's own interval stands where it is short enough, or nothing is known of a step.

    `free_bytes` where checkpoints lie: None where that is not known, and then the card's stands.
    """
    if not adapts(card):
        return None
    longest = _by_card(card, history)
    if free_bytes is None or longest is None:
        return SaveInterval(None, "no step, or no room for checkpoints, is known yet")
    stall, written = save_times(card, history)
    between = time_between_faults(met, card.slurm.nodes * gpus_of_node(card), now)
    best = best_interval(between, stall)
    why = f"one fault in {duration(between)}, a save stops the steps for {stall:,.1f} s"
    least = max(LEAST_SECONDS, written / WRITTEN_SHARE)
    if best < least:
        best = least
        why += f", and takes {duration(written)} to write"
    filled = _seconds_to_fill(card, free_bytes)
    if best < filled:
        best = filled
        why += ", and old ones are not removed sooner"
    if best >= longest:
        return SaveInterval(None, why)
    return SaveInterval(round(best / 60, 2), why)


def best_interval(between: float, stall: float) -> float:
    """Seconds from the beginning of a save to that of the next at which saves and steps that are done
    again cost least together: faults come `between` seconds apart in the mean, and a save stops the
    steps for `stall`.

    Young's sqrt(2 C M) (A first order approximation to the optimum checkpoint interval, CACM 17,
    1974). Daly's estimate of higher order (FGCS 22, 2006, equation 37) counts the steps between two
    saves alone; with the save it is Young's and a third of a save, which is less than anyone knows
    M by as long as a save is short beside it. So one figure does for all.
    """
    return math.sqrt(2 * between * stall)


def time_between_faults(met: FaultRecord, gpus: int, now: float) -> float:
    """Seconds: from the run's own record with BLOOM's rate as one fault's worth of knowledge, and
    shorter while faults come in a burst.
    """
    prior = PRIOR_GPU_HOURS * 3600 / max(1, gpus)
    usual = (prior + met.seconds) / (1 + len(met.faults))
    recent = sum(0 <= now - moment <= RECENT_SECONDS for moment in met.faults)
    if recent < FEWEST_RECENT:
        return usual
    return min(usual, RECENT_SECONDS / recent)


def save_times(card: OwnCard, history: RunHistory) -> tuple[float, float]:
    """How long a save stops the steps, and how long it takes from begin to end, in seconds: measured
    where the run has saved.
    """
    if history.stall is not None and history.usual_save is not None:
        return max(history.stall, 0.01), history.usual_save
    written = save_seconds(card)
    if card.checkpoint.asynchronous and card.checkpoint.format != "deepspeed":
        return BACKGROUND_SHARE * written, written
    return written, written


def gpus_of_node(card: OwnCard) -> int:
    """GPUs of a node, as the card says."""
    return card.slurm.gpus_per_node or card.slurm.workers


def checkpoint_size(card: OwnCard) -> float:
    """Bytes of one checkpoint."""
    return flops.checkpoint_bytes(card, flops.count_parameters(card).total)


def _seconds_to_fill(card: OwnCard, free_bytes: int) -> float:
    """Between two saves, so that those until the next removal fill no more than their share."""
    fits = math.floor(ROOM_SHARE * free_bytes / checkpoint_size(card))
    if fits < 1:
        return math.inf
    return 3600 * card.backup.interval_hours / fits


def _by_card(card: OwnCard, history: RunHistory) -> float | None:
    """The longest time between two saves by the card, in seconds; None where a step's is not known."""
    steps, minutes = card.saves_every.steps, card.saves_every.minutes
    found: Sequence[float] = ()
    if minutes is not None:
        found = (60 * minutes,)
    if steps is not None and history.step is not None:
        found = (*found, steps * history.step)
    return min(found, default=None)

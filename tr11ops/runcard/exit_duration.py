"""When the trainer saves and leaves by itself, so that Slurm's time limit costs no step. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tr11ops.base.units import duration
from tr11ops.runcard.card import OwnCard, RunCard, card_from_resolved, resolved
from tr11ops.runcard.rules import advised_exit_minutes
from tr11ops.runcard.sections import parse_time_limit
from tr11ops.runcard.speed import RunHistory, assumed_speed
from trainer.contract.attempt import ExitTime
from trainer.contract.record import JsonObject, Record
from trainer.schedule import flops

# Before a run has saved: the original wrote 2.3 TB from 48 nodes in 40 s, 1.3 GB/s from each.
SAVE_BYTES_PER_NODE_SECOND = 1e9
SAVE_START_SECONDS = 5.0
LEAST_SPARE_SECONDS = 60.0  # beyond what must be done
SPARE_SHARE = 0.25  # of what must be done: no save is as long as the last one
LARGEST_SPARE_SHARE = 0.125  # of the time limit
# of the time limit: an attempt that keeps more trains less than it waits to save
LARGEST_KEPT_SHARE = 0.5
UNKNOWN_STEP_SECONDS = 300.0
UNKNOWN_SAVE_SECONDS = 60.0
_DERIVED = "exit_duration_is_derived"


class ExitPlan(Record):
    """`minutes`: when the trainer leaves, None where nothing says so. `why`: how that was derived,
    or why it cannot be; "" where the card itself says when it leaves, in minutes or by an early
    signal. `limit`: the job's time limit by the card (seconds), None where it is not known.
    """

    minutes: float | None
    why: str = ""
    limit: float | None = None

    @property
    def is_derived(self) -> bool:
        return self.minutes is not None and bool(self.why)

    def seconds_within(self, limit: float | None) -> float | None:
        """How long an attempt trains whose job has this limit now (seconds, None: none); None where
        nothing says it.

        Derived minutes keep their distance from the limit; others are kept as they are.
        """
        own = self.limit
        if self.minutes is not None:
            own = 60.0 * self.minutes
        if own is None:
            return limit
        if limit is None:
            return own
        if self.is_derived and self.limit is not None:
            return max(0.0, limit - (self.limit - own))
        return max(0.0, min(own, limit))

    def applied(self, card: RunCard) -> RunCard:
        """The card with the derived minutes in it; the same card where none were derived."""
        if not self.is_derived:
            return card
        return card.model_copy(
            update={"run": card.run.model_copy(update={"exit_duration_minutes": self.minutes})}
        )


def exit_plan(card: RunCard, history: RunHistory | None = None) -> ExitPlan:
    """When an attempt of `card` leaves: as the card says, else so long before the time limit as it
    takes to end well.

    That is one step, one evaluation and one save, as `history` measured them or else as estimated,
    and some time to spare. An early signal makes the trainer leave by itself, so nothing is derived
    beside one.
    """
    minutes = card.run.exit_duration_minutes
    if minutes is not None or card.slurm.signal_seconds_before_limit is not None:
        return ExitPlan(minutes, limit=float(card.time_limit_seconds))
    limit = float(card.time_limit_seconds)
    kept, words = _kept(card, history, limit)
    if kept > LARGEST_KEPT_SHARE * limit:
        return ExitPlan(None, f"too little of slurm.time_limit is left beside {words}", limit=limit)
    return ExitPlan(
        _rounded((limit - kept) / 60),
        f"{duration(kept)} before the limit: {words}, the rest to spare",
        limit=limit,
    )


def _kept(card: RunCard, history: RunHistory | None, limit: float) -> tuple[float, str]:
    """Seconds that an attempt of `limit` seconds keeps to end well, and for what."""
    parts = _parts(card, history)
    need = sum(seconds for _, seconds, _ in parts)
    spare = min(max(LEAST_SPARE_SECONDS, SPARE_SHARE * need), LARGEST_SPARE_SHARE * limit)
    kept = need + spare
    # nothing says how long a step takes: the rule of thumb for what is not known
    if len(parts) == 1:
        kept = max(kept, limit - 60 * advised_exit_minutes(int(limit)))
    words = ", ".join(
        f"{name} {duration(max(1.0, seconds))} ({basis})" for name, seconds, basis in parts
    )
    return kept, words


class JobTime(Record):
    """From when to when a job has its nodes, as the scheduler says now, in seconds since the epoch.

    `end` is None where no limit ends it.
    """

    start: float
    end: float | None

    @property
    def limit(self) -> float | None:
        """Seconds."""
        if self.end is None:
            return None
        return self.end - self.start


def exit_time(card: RunCard, history: RunHistory | None, job: JobTime, began: float) -> ExitTime:
    """When an attempt of `card`, as it was written, leaves by the clock in a job of such a limit.

    As long before the limit as it takes to end well, whatever limit the card asked for. Where the
    card says when it leaves, in minutes or by an early signal, no more is kept than it keeps; its
    minutes since the attempt `began` are never exceeded.
    """
    minutes = card.run.exit_duration_minutes
    if minutes is None:
        by_card = None
    else:
        by_card = began + 60 * minutes
    if job.end is None or job.limit is None:
        return ExitTime(by_card, "" if by_card is None else f"{minutes:g} min, as the card says")
    kept, words = _kept(card, history, job.limit)
    if "(assumed)" in words:  # what no one has measured never takes most of an attempt
        kept = min(kept, LARGEST_KEPT_SHARE * job.limit)
    why = f"{duration(kept)} before the job's limit of {duration(job.limit)}: {words}, the rest to spare"
    margins = []
    if minutes is not None:
        margins.append(card.time_limit_seconds - 60 * minutes)
    if card.slurm.signal_seconds_before_limit is not None:
        margins.append(float(card.slurm.signal_seconds_before_limit))
    if margins and max(margins) < kept:
        kept = max(margins)
        why = f"{duration(kept)} before the job's limit of {duration(job.limit)}, as the card says"
    leaves = job.end - kept
    if by_card is not None and by_card < leaves:
        return ExitTime(by_card, f"{minutes:g} min, as the card says")
    return ExitTime(leaves, why)


def too_short(card: RunCard, history: RunHistory | None, job: JobTime, now: float) -> str:
    """Why a training that starts now cannot start, do a step, save and leave before its job's
    limit; "" when it can.

    By what was measured alone: an estimate holds no one up. The card's early signal needs no
    measurement: a training that is asked to leave as soon as it has started uses up the array.
    """
    if job.end is None or job.limit is None:
        return ""
    history = history or RunHistory()
    start = [("a start", history.start), ("a step", history.step)]
    said = f"the job's time limit of {duration(job.limit)} is too short"
    early = card.slurm.signal_seconds_before_limit
    if early is not None and job.end - now - early <= _measured_seconds(start):
        return (
            f"{said}: the signal to leave comes {duration(early)} before it, as the card says "
            "(slurm.signal_seconds_before_limit)"
        )
    if history.save is None:
        return ""
    parts = [*start, ("a save", history.save)]
    spare = min(LEAST_SPARE_SECONDS, LARGEST_SPARE_SHARE * job.limit)
    if job.end - now > _measured_seconds(parts) + spare:
        return ""
    words = ", ".join(
        f"{name} {duration(max(1.0, seconds))}" for name, seconds in parts if seconds is not None
    )
    return f"{said} to train and save in: {words} (measured)"


def _measured_seconds(parts: Sequence[tuple[str, float | None]]) -> float:
    return sum(seconds for _, seconds in parts if seconds is not None)


def seconds_to_end(card: RunCard) -> float:
    """What a training needs from the word to stop until it has saved, with time to spare, where no
    limit bounds that.

    Where nothing says how long a step takes, five minutes stand for it.
    """
    parts = _parts(card, None)
    need = sum(seconds for _, seconds, _ in parts) + (
        UNKNOWN_STEP_SECONDS if len(parts) == 1 else 0.0
    )
    return need + max(LEAST_SPARE_SECONDS, SPARE_SHARE * need)


def _rounded(minutes: float) -> float:
    if minutes >= 10:
        return float(math.floor(minutes))
    return math.floor(100 * minutes) / 100


def _parts(card: RunCard, history: RunHistory | None) -> list[tuple[str, float, str]]:
    """What must be done before the end: (name, seconds, basis). A step and an evaluation only where
    they are known.
    """
    measured_step = history.step if history else None
    assumed = None
    if measured_step is None and isinstance(card, OwnCard):
        assumed = assumed_speed(card)
    if measured_step is not None:
        step = measured_step
    elif assumed:
        step = assumed.full
    else:
        step = None
    parts = []
    if step is not None:
        parts.append(("a step", step, "measured" if measured_step is not None else "assumed"))
    if isinstance(card, OwnCard) and card.evaluation.iterations > 0:
        evaluation = history.evaluation if history else None
        if evaluation is not None:
            parts.append(("an evaluation", evaluation, "measured"))
        elif step is not None:
            parts.append(("an evaluation", _evaluation_seconds(card, step), "assumed"))
    save = history.save if history else None
    if save is not None:
        parts.append(("a save", save, "measured"))
    else:
        parts.append(("a save", save_seconds(card), "assumed"))
    return parts


def save_seconds(card: RunCard) -> float:
    """By what a model of this size takes to write; of another trainer's nothing is known, and a
    minute stands for it.
    """
    if not isinstance(card, OwnCard):
        return UNKNOWN_SAVE_SECONDS
    written = flops.checkpoint_bytes(card, flops.count_parameters(card).total)
    return SAVE_START_SECONDS + written / (card.slurm.nodes * SAVE_BYTES_PER_NODE_SECOND)


def _evaluation_seconds(card: OwnCard, step: float) -> float:
    """Forward passes of every validation set: a quarter of a step each, a third where nothing is
    recomputed.

    29 sets of one batch of the original make 12.7 minutes, which took 12. Groups in a file count as
    one.
    """
    data = card.data
    sets = len(data.valid_groups) or (1 + len(data.prefixes) if data.validate_each else 1)
    return step / flops.passes(card.model) * sets * card.evaluation.iterations


# ----------------------------------------------------------------------------- the card that the
# trainer reads
def resolved_with_exit(card: RunCard, plan: ExitPlan) -> JsonObject:
    """`card` resolved, with the minutes of `plan` in it; its hash stays that of the card as it was
    written.
    """
    value = resolved(plan.applied(card))
    derived = {**value["derived"], "card_hash": card.digest}
    return {**value, "derived": {**derived, _DERIVED: True} if plan.is_derived else derived}


def derived_again(
    value: JsonObject, source: str, history: RunHistory
) -> tuple[JsonObject, ExitPlan]:
    """A resolved card at the start of an attempt, with its derived minutes derived from what was
    measured since.

    A launch knows nothing of the saves that the first tasks of its array will make. What the card
    itself says stays, and so does an earlier figure where none can be derived any more. Raises
    CardError when it is no resolved card.
    """
    written = card_as_written(value, source)
    plan = exit_plan(written, history)
    if (
        not plan.is_derived
        or written.run.exit_duration_minutes == value["run"]["exit_duration_minutes"]
    ):
        return dict(value), ExitPlan(value["run"]["exit_duration_minutes"])
    return {**value, "run": {**value["run"], "exit_duration_minutes": plan.minutes}}, plan


def _is_derived(value: JsonObject) -> bool:
    """Whether the minutes in a resolved card were derived, so that they follow the job's limit."""
    derived = value.get("derived")
    return isinstance(derived, Mapping) and derived.get(_DERIVED) is True


def resolved_exit_plan(value: JsonObject) -> ExitPlan | None:
    """When an attempt with this resolved card leaves; None where its keys are not to be read."""
    try:
        limit = float(parse_time_limit(value["slurm"]["time_limit"]))
        minutes = value["run"].get("exit_duration_minutes")
        if minutes is not None:
            minutes = float(minutes)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None
    if minutes is not None and not 0 < minutes < math.inf:
        return None
    why = ""
    if _is_derived(value):
        why = "so long before the limit"
    return ExitPlan(minutes, why, limit)


def card_as_written(value: JsonObject, source: str) -> RunCard:
    """The card that `resolved_with_exit` was given, without what was derived. Raises CardError when
    it is not one.
    """
    if _is_derived(value):
        value = {**value, "run": {**value["run"], "exit_duration_minutes": None}}
    return card_from_resolved(value, source)

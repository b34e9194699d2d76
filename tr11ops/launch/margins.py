"""Whether the end of each attempt leaves time for what must still be done: a step, an evaluation, a save. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.launch.check import Check, ok, refused, warning
from tr11ops.launch.history import RunHistory
from tr11ops.runcard import RunCard
from tr11ops.units import duration

SIGNAL_SLACK_SECONDS = 60.0  # Slurm's early signal came up to a minute off its time; later by as much is allowed for


def seconds_before_limit(card: RunCard) -> float | None:
    """Time from the trainer's leave to Slurm's end of the attempt; None when nothing makes it leave before.

    The exit duration counts as it is, the early signal less its slack; the earlier of the two is what happens.
    """
    rooms = []
    if card.run.exit_duration_minutes is not None:
        rooms.append(card.time_limit_seconds - 60 * card.run.exit_duration_minutes)
    if card.slurm.signal_seconds_before_limit is not None:
        rooms.append(card.slurm.signal_seconds_before_limit - SIGNAL_SLACK_SECONDS)
    return max(rooms, default=None)


def is_measured(history: RunHistory) -> bool:
    """Has the run saved before, so that its own times can be used in place of a rule of thumb?"""
    return history.save is not None


def margin_checks(card: RunCard, history: RunHistory) -> Iterator[Check]:
    """Compare the room with the run's own longest times. Nothing is said of a run that never saved."""
    room = seconds_before_limit(card)
    if room is None or history.save is None:
        return
    must = (history.step or 0.0) + history.save
    evaluation = history.evaluation or 0.0 if card.evaluation.iterations > 0 else 0.0
    wanted = must + evaluation
    parts = [("a step", history.step), ("an evaluation", evaluation or None), ("a save", history.save)]
    measured = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts if seconds is not None)
    left = f"{duration(room)} are left before the time limit; measured in this run: {measured}"
    if room >= wanted:
        yield ok("margin", left)
        return
    key, fix = _fix(card, wanted)
    if room < must:
        yield refused(key, f"the last checkpoint of each attempt would be lost: {left}", fix, 2)
    else:
        yield warning(key, f"an evaluation at the end of an attempt may cost its last checkpoint: {left}", fix)


def _fix(card: RunCard, wanted: float) -> tuple[str, str]:
    """The key that decides, and its value for `wanted` seconds of room."""
    most = (card.time_limit_seconds - wanted) / 60
    if most >= 1:
        return "run.exit_duration_minutes", f"use {int(most)} or less"
    return "slurm.time_limit", f"use {duration(wanted)} and more, and leave run.exit_duration_minutes as much below it"

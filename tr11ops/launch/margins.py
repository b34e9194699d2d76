"""Whether the end of each attempt leaves time for what must still be done: a step, an evaluation, a
save. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.units import duration
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, warning
from tr11ops.runcard.rules import SIGNAL_SLACK_SECONDS
from tr11ops.runcard.speed import RunHistory
from trainer.contract.record import Record


class TimeMargin(Record):
    """Time from the trainer's leave to Slurm's end of the attempt, in seconds.

    `sure` is less than `nominal` where the early signal alone makes the trainer leave, for that may
    come late.
    """

    nominal: float
    sure: float


def room_before_limit(card: RunCard) -> TimeMargin | None:
    """The room that exit duration and early signal leave, whichever is the earlier; None when
    neither is set.
    """
    rooms = []
    if card.run.exit_duration_minutes is not None:
        left = card.time_limit_seconds - 60 * card.run.exit_duration_minutes
        rooms.append(TimeMargin(left, left))
    early = card.slurm.signal_seconds_before_limit
    if early is not None:
        rooms.append(TimeMargin(early, max(0.0, early - SIGNAL_SLACK_SECONDS)))
    return max(rooms, key=lambda room: (room.sure, room.nominal), default=None)


def is_measured(history: RunHistory) -> bool:
    """Has the run saved before, so that its own times can be used in place of a rule of thumb?"""
    return history.save is not None


def margin_checks(card: RunCard, history: RunHistory) -> Iterator[PreflightCheck]:
    """Compare the room with the run's own longest times. Nothing is said of a run that never saved."""
    room = room_before_limit(card)
    if room is None or history.save is None:
        return
    must = (history.step or 0.0) + history.save
    evaluation = 0.0
    if card.evaluation.iterations > 0:
        evaluation = history.evaluation or 0.0
    wanted = must + evaluation
    parts = [
        ("a step", history.step),
        ("an evaluation", evaluation or None),
        ("a save", history.save),
    ]
    measured = ", ".join(
        f"{name} {duration(seconds)}" for name, seconds in parts if seconds is not None
    )
    late = ", and Slurm's signal may come a minute late" if room.sure < room.nominal else ""
    left = f"{duration(room.nominal)} are left before the time limit{late}; measured in this run: {measured}"
    key, fix = _fix(card, wanted)
    if room.sure >= wanted:
        yield ok("margin", left)
    elif room.nominal < must:
        yield refused(key, f"the last checkpoint of each attempt would be lost: {left}", fix, 2)
    elif room.sure < must:
        yield warning(key, f"a late signal may cost the last checkpoint of an attempt: {left}", fix)
    else:
        yield warning(
            key, f"an evaluation at the end of an attempt may cost its last checkpoint: {left}", fix
        )


def _fix(card: RunCard, wanted: float) -> tuple[str, str]:
    """The key that decides, and its value for `wanted` seconds of room."""
    most = (card.time_limit_seconds - wanted) / 60
    if most >= 1:
        return "run.exit_duration_minutes", f"use {int(most)} or less"
    return (
        "slurm.time_limit",
        f"use {duration(wanted)} and more, and leave run.exit_duration_minutes as much below it",
    )

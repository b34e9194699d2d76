"""What a replay counts while it goes on, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tr11ops.replay.parameters import Parameters
from trainer.contract.record import Record


class LaunchCourse(Record):
    """How far a launch came: iterations done, and saved; after which it began to save, and evaluated."""

    done: int
    saved: int
    saves: Sequence[int] = ()
    evaluations: Sequence[int] = ()


class IdleReason(StrEnum):
    """Why no launch runs; each is a field of `LostTime`."""

    STARTS = "starts"
    BROKEN = "broken"
    KEPT_OUT = "kept_out"
    HELD = "held"


@dataclass
class LostTime:
    """Where the time went that trained nothing that was kept, in seconds.

    `redone`: steps that no save had kept, and what was begun and not ended; `saves` and
    `evaluations`; `starts`: from a task's or launch's beginning to its first step, and from one task
    to the next; `unseen`: from a fault until its launch had ended. Without an allocation: `broken`,
    fewer nodes were well than train; `kept_out`, enough were, but some were excluded, or more were
    asked for; `held`, nothing was queued that might start.
    """

    redone: float = 0.0
    saves: float = 0.0
    evaluations: float = 0.0
    starts: float = 0.0
    unseen: float = 0.0
    broken: float = 0.0
    kept_out: float = 0.0
    held: float = 0.0

    def add_idle(self, reason: IdleReason, seconds: float) -> None:
        """Time in which no launch ran."""
        setattr(self, reason, getattr(self, reason) + seconds)

    def add_training(
        self, times: Parameters, seconds: float, course: LaunchCourse, *, begun: int, kept: int
    ) -> None:
        """Seconds of training that began at iteration `begun`, of which those up to `kept` count."""
        saves = times.save * sum(step <= kept for step in course.saves)
        evaluations = times.evaluation * sum(step <= kept for step in course.evaluations)
        self.saves += saves
        self.evaluations += evaluations
        self.redone += seconds - times.step * (kept - begun) - saves - evaluations


@dataclass
class Account:
    """Node-seconds held, seconds without nodes, events, and where the time went."""

    held: float = 0.0
    waited: float = 0.0
    launches: int = 0
    tasks: int = 0
    burned: int = 0
    acts: int = 0
    mails: int = 0
    innocent: int = 0
    excluded: int = 0
    lost: LostTime = field(default_factory=LostTime)

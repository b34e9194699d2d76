"""Where a training stands: the counters that move with every step and survive in every checkpoint.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from trainer.contract.record import Record
from trainer.schedule.path import Position


class Progress(Record):
    """`skipped` (updates that were dropped) and `nan` count over the whole training.

    `unscheduled_samples` and `unscheduled_tokens` are those of dropped updates: consumed, but the
    learning-rate schedule did not move for them.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0
    nan: int = 0
    unscheduled_samples: int = 0
    unscheduled_tokens: int = 0

    @classmethod
    def from_cursor(cls, cursor: Mapping[str, Any]) -> Progress:
        """The counters of a checkpoint; one that it does not know is zero."""
        return cls(**{name: int(cursor.get(name, 0)) for name in cls.__struct_fields__})

    @property
    def position(self) -> Position:
        return Position(self.iteration, self.consumed_samples, self.consumed_tokens)

    @property
    def scheduled_samples(self) -> int:
        """Where the learning-rate schedule stands, in samples."""
        return self.consumed_samples - self.unscheduled_samples

    @property
    def scheduled_tokens(self) -> int:
        """Where the learning-rate schedule stands, in tokens."""
        return self.consumed_tokens - self.unscheduled_tokens

    def after_step(
        self, samples: int, sequence_length: int, loss: float, skipped: bool
    ) -> Progress:
        """The counters after one step of `samples` samples; data is consumed even where the update
        was dropped.
        """
        tokens = samples * sequence_length
        return replace(
            self.moved_to(
                Position(
                    self.iteration + 1,
                    self.consumed_samples + samples,
                    self.consumed_tokens + tokens,
                )
            ),
            skipped=self.skipped + int(skipped),
            nan=self.nan + int(not math.isfinite(loss)),
            unscheduled_samples=self.unscheduled_samples + samples * skipped,
            unscheduled_tokens=self.unscheduled_tokens + tokens * skipped,
        )

    def moved_to(self, position: Position) -> Progress:
        """The counters at another place of the training's way, where nothing was trained in
        between.
        """
        return replace(
            self,
            iteration=position.iteration,
            consumed_samples=position.consumed_samples,
            consumed_tokens=position.consumed_tokens,
        )

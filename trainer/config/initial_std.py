"""Which initial weights a width bears: the rule for cards and for imported scripts. Free of torch."""

from __future__ import annotations

import math

from trainer.contract.record import Record

LARGEST_RATIO = 2.5  # of the wide bound; 0.02 on 11,600 columns was 3.4 and diverged
WHAT_IT_COST = (
    "a 104B training diverged right after its warm-up, twice, and again with another seed"
)


class StdAdvice(Record):
    """Deviations that a width bears: sqrt(1/(3h)), which trained the 176B model, and at most about
    sqrt(2/(5h)).
    """

    narrow: float
    wide: float

    def __str__(self) -> str:
        return f"{self.narrow:.2g} (sqrt(1/3h)) or {self.wide:.2g} (sqrt(2/5h))"


def too_large(std: float, hidden_size: int) -> StdAdvice | None:
    """What to use where a deviation is far above what the width bears; None where it is not."""
    wide = math.sqrt(2 / (5 * hidden_size))
    if std > LARGEST_RATIO * wide:
        return StdAdvice(math.sqrt(1 / (3 * hidden_size)), wide)
    return None

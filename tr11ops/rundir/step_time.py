"""How long a step takes, by what a log tells of the last ones: one rule for all that look ahead
from it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

RECENT_STEPS = 100
# beyond: a corrupt line, which would overflow a forecast
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-6, 1e8


def is_step_time(seconds: float) -> bool:
    """Whether a training can take so long for a step; NaN, what is not finite, zero and less are no
    times.
    """
    return SHORTEST_SECONDS < seconds < LONGEST_SECONDS


def usual_step_seconds(told: Iterable[float]) -> float | None:
    """Median of the last steps, in seconds: the mean would carry the few slow ones along. `told`:
    oldest first.
    """
    likely = [seconds for seconds in list(told)[-RECENT_STEPS:] if is_step_time(seconds)]
    if likely:
        return median(likely)
    return None

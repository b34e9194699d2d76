"""Numbers that a few outliers do not change: spread, error, and how long a step takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

RECENT_STEPS = 100
# So many steps in a row, each so much longer (or shorter) than the usual one before them, are a
# new pace: a few slow ones are not, as other steps stand between them.
PACE_STEPS = 10
PACE_FACTOR = 1.25
# beyond: a corrupt line, which would overflow a forecast
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-6, 1e8


def is_step_time(seconds: float) -> bool:
    """Whether a training can take so long for a step; NaN, what is not finite, zero and less are no
    times.
    """
    return SHORTEST_SECONDS < seconds < LONGEST_SECONDS


def usual_step_seconds(told: Iterable[float]) -> float | None:
    """Median of the last steps, in seconds: the mean would carry the few slow ones along. `told`:
    oldest first. Where the last ten are all longer, or all shorter, than what was usual before
    them, the pace has changed, and theirs counts: a forecast is of now.
    """
    likely = [seconds for seconds in list(told)[-RECENT_STEPS:] if is_step_time(seconds)]
    if not likely:
        return None
    before, last = likely[:-PACE_STEPS], likely[-PACE_STEPS:]
    if before and _is_another_pace(last, median(before)):
        return median(last)
    return median(likely)


def _is_another_pace(last: Sequence[float], usual: float) -> bool:
    return min(last) > PACE_FACTOR * usual or max(last) * PACE_FACTOR < usual


_MAD_TO_SIGMA = 1.4826
_MEDIAN_ERROR = math.sqrt(math.pi / 2)


def robust_sigma(deviations: Iterable[float]) -> float:
    """The standard deviation, were it a normal distribution: 1.4826 times the median of the
    absolute deviations.

    Raises StatisticsError where there are none.
    """
    return _MAD_TO_SIGMA * median(map(abs, deviations))


def error_of_median(sigma: float, count: int) -> float:
    """The standard error of the median of `count` values that scatter by `sigma`: sqrt(pi / 2)
    times a mean's.
    """
    return _MEDIAN_ERROR * sigma / math.sqrt(count)

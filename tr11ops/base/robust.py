"""Spread and error that a few outliers do not change. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

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

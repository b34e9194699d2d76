"""What was usual: the median of the last values, kept in order so that each new one costs little."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque


class RunningMedian:
    """The median of the last `length` values; NaN, above which nothing is high, until there are
    `least`.
    """

    def __init__(self, length: int, least: int) -> None:
        self._values: deque[float] = deque()
        self._ordered: list[float] = []
        self._length, self._least = length, least

    def add(self, value: float) -> None:
        """Take a finite value."""
        self._values.append(value)
        insort(self._ordered, value)
        if len(self._values) > self._length:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]

    @property
    def value(self) -> float:
        count = len(self._ordered)
        if count < self._least:
            return math.nan
        return 0.5 * (self._ordered[(count - 1) // 2] + self._ordered[count // 2])

    def clear(self) -> None:
        self._values.clear()
        self._ordered.clear()

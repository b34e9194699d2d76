"""Curves as lines of letters, for a terminal. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_uppercase

from tr11ops.curves.curve import RunCurve, wants_logarithm

BOTH = "*"  # where curves lie on each other
LABEL_WIDTH = 9


def text_plot(curves: Sequence[RunCurve], width: int, height: int) -> list[str]:
    """`height` lines, each at most `width` wide: the first curve drawn with A, the next with B, and
    so on.

    A column shows the mean of the values that fall into it.
    """
    columns = width - LABEL_WIDTH - 2
    low_x, high_x = min(curve.x[0] for curve in curves), max(curve.x[-1] for curve in curves)
    drawn = [_columns(curve, low_x, high_x, columns) for curve in curves]
    values = [value for own in drawn for value in own if value is not None]
    low, high = min(values), max(values)
    is_log = wants_logarithm(low, high)
    rows = [[" "] * columns for _ in range(height)]
    for letter, own in zip(ascii_uppercase, drawn, strict=False):
        for column, value in enumerate(own):
            if value is not None:
                cells = rows[_row(value, low, high, height, is_log)]
                cells[column] = letter if cells[column] == " " else BOTH
    labels = {0: high, height // 2: _middle(low, high, is_log), height - 1: low}
    return [
        f"{labels[index]:>{LABEL_WIDTH}.4g} |{''.join(cells)}".rstrip()
        if index in labels
        else f"{'':{LABEL_WIDTH}} |{''.join(cells)}".rstrip()
        for index, cells in enumerate(rows)
    ]


def _columns(curve: RunCurve, low: float, high: float, count: int) -> list[float | None]:
    sums, counts = [0.0] * count, [0] * count
    for x, y in zip(curve.x, curve.y, strict=True):
        column = 0
        if high > low:
            column = min(count - 1, int((x - low) / (high - low) * count))
        sums[column] += y
        counts[column] += 1
    return [total / number if number else None for total, number in zip(sums, counts, strict=True)]


def _row(value: float, low: float, high: float, height: int, is_log: bool) -> int:
    if high <= low:
        return height // 2
    if is_log:
        share = math.log(value / low) / math.log(high / low)
    else:
        share = (value - low) / (high - low)
    return round((1.0 - share) * (height - 1))


def _middle(low: float, high: float, is_log: bool) -> float:
    if is_log:
        return math.sqrt(low * high)
    return 0.5 * (low + high)

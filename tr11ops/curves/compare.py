"""Two runs or more, laid over each other: where one lies below the other, and by more than noise;
and drawn as lines of letters.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from string import ascii_uppercase

from tr11ops.curves.curve import WHOLE, CurveLevel, CurveRange, RunCurve, wants_logarithm
from trainer.contract.record import Record

# Curves as lines of letters, for a terminal. Pure.

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
                cells = rows[_row(value, low, high=high, height=height, is_log=is_log)]
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


ROWS, LINES = 10, 20
SURE = 2.0  # standard errors of a difference that is more than noise


class ComparisonRow(Record):
    """The levels of every run at one x, in the order of the runs."""

    x: float
    levels: tuple[CurveLevel, ...]

    def difference(self, index: int) -> float:
        """Of that run to the first."""
        return self.levels[index].mean - self.levels[0].mean

    def is_sure(self, index: int) -> bool:
        """Whether that difference is more than noise."""
        error = math.hypot(self.levels[index].error, self.levels[0].error)
        return abs(self.difference(index)) > SURE * error


class CurveComparison(Record):
    """`lines` are those that a level is the mean of. `rows` lie where all runs have values, the
    last at the end of the shortest. `reached`: for each run but the first, the x at which it is at
    the first one's last level.
    """

    names: tuple[str, ...]
    lines: int
    rows: tuple[ComparisonRow, ...]
    reached: tuple[float | None, ...]

    def sentence(self, index: int, axis: str) -> str:
        """How that run compares with the first, in a sentence or two."""
        last, other, first = self.rows[-1], self.names[index], self.names[0]
        difference = last.difference(index)
        place = f"at {axis} {axis_text(last.x, axis)}"
        if not last.is_sure(index):
            said = (
                f"{other} and {first} do not differ by more than noise {place} ({difference:+.4g})"
            )
        else:
            word = "below" if difference < 0 else "above"
            said = f"{other} is {abs(difference):.4g} {word} {first} {place}"
        below = sum(row.difference(index) < 0 and row.is_sure(index) for row in self.rows)
        above = sum(row.difference(index) > 0 and row.is_sure(index) for row in self.rows)
        said += f"; below in {below}, above in {above} of {len(self.rows)} rows"
        reached = self.reached[index - 1]
        if difference < 0 and last.is_sure(index) and reached is not None and reached < last.x:
            said += f"; it is at {first}'s last level by {axis} {axis_text(reached, axis)}"
        return f"{said}."


def compare(
    curves: Sequence[RunCurve], rows: int = ROWS, lines: int = LINES, within: CurveRange = WHOLE
) -> CurveComparison:
    """Compare the courses where all of them have values; `within` is the part of them that they
    are.

    Raises ValueError, one line, where they share none.
    """
    empty = [curve.name for curve in curves if not curve.x]
    if empty:
        raise ValueError(f"{empty[0]}: holds no finite value {within}".rstrip())
    begin, end = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    if begin > end:
        late = max(curves, key=lambda curve: curve.x[0])
        raise ValueError(f"{late.name} begins at {late.x[0]:g}, where another has ended ({end:g})")
    lines = max(1, min(lines, *(len(curve.x) for curve in curves)))
    # no more rows than there are values after the first
    rows = min(
        rows, max(bisect_right(curve.x, end) - bisect_right(curve.x, begin) for curve in curves)
    )
    places = [begin + (end - begin) * (index + 1) / rows for index in range(rows)] or [end]
    found = tuple(
        ComparisonRow(x, tuple(curve.level(x, lines) for curve in curves)) for x in places
    )
    last = found[-1].levels[0].mean
    reached = tuple(curve.reaches(last, max(lines, len(curve.x) // 50)) for curve in curves[1:])
    return CurveComparison(tuple(curve.name for curve in curves), lines, found, reached)


def axis_text(x: float, axis: str) -> str:
    """A place on the axis as a table shows it."""
    if axis != "hours":
        return f"{x:,.0f}"
    if x >= 1:
        return f"{x:,.2f} h"
    return f"{x:.3g} h"

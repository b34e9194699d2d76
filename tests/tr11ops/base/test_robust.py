"""How long a step takes: a few slow ones change nothing, a new pace does."""

from __future__ import annotations

import math

import pytest

from tr11ops.base.robust import PACE_STEPS, usual_step_seconds

USUAL, SLOW = [1.0, 1.1] * 45, [8.0, 8.2] * 5


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], None),
        ([math.nan, 0.0, 1e9], None),
        ([3.0], 3.0),
        (SLOW, 8.1),  # the first steps of all: nothing was before them
        (USUAL, 1.05),
        ([*USUAL, *SLOW[:-1]], 1.1),  # nine slow ones may still pass
        ([*USUAL, *SLOW], 8.1),
        ([*USUAL, *SLOW[:5], 1.0, *SLOW[:5]], 1.1),  # one of the usual length: not a new pace
        ([*USUAL, *SLOW, math.nan], 8.1),  # what is no time is no step of the ten
        ([*[8.0] * 90, *[1.0] * PACE_STEPS], 1.0),  # quick again
        ([*USUAL, *[1.2] * PACE_STEPS], 1.1),  # within what machines differ by
    ],
)
def test_the_usual_step_is_that_of_the_pace_of_now(
    steps: list[float], expected: float | None
) -> None:
    seen = usual_step_seconds(steps)
    if expected is None:
        assert seen is None
    else:
        assert seen == pytest.approx(expected)

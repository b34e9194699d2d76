"""The greedy rule in fixed point and in float64: the same choices, also where two members are
equally far behind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.data import blend
from trainer.data.blend import advance

Columns = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]


def plain(
    shares: list[float], counts: list[int], sample: int, steps: int
) -> tuple[list[int], list[int]]:
    """The rule of one column in Python's floats: members and how often each was taken before."""
    held, chosen, taken = list(counts), [], []
    for index in range(sample, sample + steps):
        behind = [share * max(index, 1) - count for share, count in zip(shares, held, strict=True)]
        best = behind.index(max(behind))
        chosen.append(best)
        taken.append(held[best])
        held[best] += 1
    return chosen, taken


@given(
    weights=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=40)
    | st.lists(st.integers(1, 9), min_size=1, max_size=9),
    first=st.integers(0, 2**36),
    steps=st.integers(1, 200),
)
@settings(max_examples=60, deadline=None)
def test_every_column_follows_the_rule(weights: list[float], first: int, steps: int) -> None:
    shares = np.array(weights, dtype=np.float64) / np.sum(weights)
    positions = first + np.arange(5) * 77
    counts = blend._guess(shares, positions)
    begins = counts.copy()
    sets, numbers = np.empty((5, steps), np.uint8), np.empty((5, steps), np.int64)
    advance(shares, counts, positions, steps, sets, numbers)
    for column, position in enumerate(positions.tolist()):
        chosen, taken = plain(
            shares.tolist(), begins[:, column].astype(int).tolist(), position, steps
        )
        assert sets[column].tolist() == chosen and numbers[column].tolist() == taken
    added = [np.bincount(row, minlength=len(shares)) for row in sets]
    assert np.array_equal(counts, begins + np.stack(added, axis=1))


@given(
    shift=st.lists(st.integers(-40, 40), min_size=4, max_size=4),
    position=st.integers(1000, 10**9),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_counts_far_from_any_plausible_ones(shift: list[int], position: int) -> None:
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    counts = np.maximum(np.floor(shares * position) + shift, 0)[:, None]
    sets, numbers = np.empty((1, 90), np.uint8), np.empty((1, 90), np.int64)
    expected = plain(shares.tolist(), counts[:, 0].astype(int).tolist(), position, 90)
    advance(shares, counts, np.array([position]), 90, sets, numbers)
    assert (sets[0].tolist(), numbers[0].tolist()) == expected


def test_clear_choices_are_made_in_fixed_point_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made_exactly = []
    real = blend._Exactly.advance

    def counted(self: blend._Exactly, *arguments: Any) -> None:
        made_exactly.append(self.columns)
        real(self, *arguments)

    monkeypatch.setattr(blend._Exactly, "advance", counted)
    shares = np.array([0.31830988, 0.36787944, 0.31381068])
    positions = np.arange(1000, 201_000, 1000)
    advance(shares, blend._guess(shares, positions), positions, 128)
    assert sum(made_exactly) < 20  # of 400 columns' tiles
    made_exactly.clear()
    advance(
        np.array([0.5, 0.3, 0.2]),
        blend._guess(np.array([0.5, 0.3, 0.2]), positions),
        positions,
        128,
    )
    assert sum(made_exactly) == 400

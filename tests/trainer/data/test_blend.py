"""Mixtures and splits: the definition's vectors, exact arithmetic, and what is refused."""

from __future__ import annotations

import hashlib
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.contract.errors import DataError
from trainer.data import blend
from trainer.data.blend import advance, build_blend, member_samples, normalised
from trainer.data.groups import parse_split, split_documents

WEIGHTS = st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=8)


def slow_blend(weights: list[float], samples: int) -> list[int]:
    """The greedy rule in plain Python floats, which are numpy's."""
    once = np.array(normalised(weights))
    shares = (once / np.sum(once)).tolist()
    counts = [0] * len(weights)
    chosen = []
    for index in range(samples):
        behind = [
            share * max(index, 1) - count for share, count in zip(shares, counts, strict=True)
        ]
        best = behind.index(max(behind))
        counts[best] += 1
        chosen.append(best)
    return chosen


def test_blend_of_the_definition() -> None:
    sets, numbers = build_blend([0.5, 0.3, 0.2], 10)
    assert sets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
    assert numbers.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]
    assert sets.dtype == np.uint8 and numbers.dtype == np.int64


@given(weights=WEIGHTS, samples=st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_blend_is_the_greedy_rule(weights: list[float], samples: int) -> None:
    sets, numbers = build_blend(weights, samples)
    assert sets.tolist() == slow_blend(weights, samples)
    seen: Counter[int] = Counter()
    for chosen, number in zip(sets.tolist(), numbers.tolist(), strict=True):
        assert number == seen[chosen]
        seen[chosen] += 1
    for member, share in enumerate(normalised(weights)):
        assert seen[member] <= share * samples + 1
        # No member is asked for more than was prepared of it.
        assert seen[member] <= member_samples(weights, samples)[member]


@given(
    weights=st.lists(st.floats(1e-5, 1.0), min_size=2, max_size=6),
    samples=st.integers(500, 2500),
    block=st.integers(300, 3000),
    segments=st.integers(1, 40),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_segments_side_by_side_make_the_sequential_choices(
    *,
    monkeypatch: pytest.MonkeyPatch,
    weights: list[float],
    samples: int,
    block: int,
    segments: int,
) -> None:
    monkeypatch.setattr(blend, "BLEND_WARM_UP", 1)
    monkeypatch.setattr(blend, "BLEND_SEGMENTS", segments)
    monkeypatch.setattr(blend, "BLEND_BLOCK", block)
    assert build_blend(weights, samples)[0].tolist() == slow_blend(weights, samples)


def test_wrong_guesses_are_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_the_first(
        shares: npt.NDArray[np.float64], positions: npt.NDArray[np.int64], at_least: object = None
    ) -> npt.NDArray[np.float64]:
        return np.stack([positions.astype(float), *[np.zeros(len(positions))] * (len(shares) - 1)])

    monkeypatch.setattr(blend, "BLEND_WARM_UP", 1)
    monkeypatch.setattr(blend, "_guess", all_of_the_first)
    assert build_blend([0.2, 0.5, 0.3], 1500)[0].tolist() == slow_blend([0.2, 0.5, 0.3], 1500)


def test_rare_members_are_found_whatever_the_segments_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [1e-4] * 4 + [0.31, 0.27, 0.2, 0.13, 0.05]
    expected = slow_blend(weights, 30_000)
    # so that whole rows of segments begin before and after the moment it is taken
    assert expected.count(0) >= 2
    for segments in (3, 100, 1 << 14):
        monkeypatch.setattr(blend, "BLEND_SEGMENTS", segments)
        assert build_blend(weights, 30_000)[0].tolist() == expected


@given(weights=WEIGHTS, samples=st.integers(1, 200), more=st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_a_longer_mixture_only_appends(weights: list[float], samples: int, more: int) -> None:
    short, long = build_blend(weights, samples), build_blend(weights, samples + more)
    assert (
        short[0].tolist() == long[0][:samples].tolist()
        and short[1].tolist() == long[1][:samples].tolist()
    )


# Digests of the choices of megatron-core 0.16.1's compiled code, the members as int16: weights,
# samples.
def uneven(seed: int, count: int) -> list[float]:
    return (np.random.RandomState(seed).pareto(1.0, count) + 1e-4).tolist()


MEGATRON = [
    ([0.5, 0.3, 0.2], 100_000, "81e3962a7a22392d"),
    ([1.0, 1.0, 1.0, 1.0], 20_000, "88125b4e53ffd22b"),
    ([1e-6, 0.3, 1e-6, 0.7], 100_000, "9617fe403e98f08a"),
    (uneven(1, 28), 200_000, "14b6ad0baf02f645"),
    (uneven(2, 28), 200_000, "b502ba19a4e29646"),
    (uneven(3, 3), 100_000, "015b23bd979d39d5"),
    (uneven(4, 250), 100_000, "feeb298a9f96e217"),
]


@pytest.mark.parametrize(("weights", "samples", "expected"), MEGATRON)
def test_blends_equal_megatron(weights: list[float], samples: int, expected: str) -> None:
    sets, numbers = build_blend(weights, samples)
    digest = hashlib.blake2b(sets.astype(np.int16).tobytes() + numbers.tobytes(), digest_size=8)
    assert digest.hexdigest() == expected


def test_more_members_than_a_byte_holds() -> None:
    sets, _ = build_blend([1.0] * 300, 600)
    assert Counter(sets.tolist()) == dict.fromkeys(range(300), 2)


def test_members_are_asked_for_their_share_and_a_little_more() -> None:
    assert member_samples([3.0], 1000) == (1000,)
    assert member_samples([0.5, 0.5], 1000) == (503, 503)
    assert member_samples([1.0, 999.0], 1000) == (2, 1004)


@pytest.mark.parametrize(
    "weights", [[], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0]]
)
def test_weights_must_be_positive(weights: list[float]) -> None:
    with pytest.raises(DataError, match="positive"):
        normalised(weights)


@pytest.mark.parametrize(
    ("split", "count", "bounds"),
    [
        ("949,50,1", 1000, (949, 999, 1000)),
        ("949,50,1", 1949, (1850, 1947, 1949)),
        ("969, 30, 1", 100, (97, 100, 100)),
        ("1", 7, (7, 7, 7)),
        ("1,1,1", 4, (2, 3, 4)),
        (
            "50,50",
            3,
            (1, 3, 3),
        ),  # both round 1.5 up to 2; the excess of 1 comes off all but the first boundary
    ],
)
def test_split_rule(split: str, count: int, bounds: tuple[int, ...]) -> None:
    assert tuple(part.stop for part in split_documents(split, count)) == bounds


@given(
    shares=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any),
    count=st.integers(0, 5000),
)
@settings(deadline=None)
def test_splits_cover_everything_once(shares: list[int], count: int) -> None:
    parts = split_documents(",".join(map(str, shares)), count)
    assert [number for part in parts for number in part] == list(range(count))
    for part, share in zip(parts, [*shares, 0, 0], strict=False):
        assert abs(len(part) - Fraction(share, sum(shares)) * count) <= 2


@pytest.mark.parametrize("split", ["", "a,b,c", "1,2,3,4", "-1,2,3", "0,0,0", "nan,1", "inf,1"])
def test_malformed_splits_are_refused(split: str) -> None:
    with pytest.raises(DataError, match="split"):
        parse_split(split)


# ----------------------------------------------------------------------------- greedy
# The greedy rule in fixed point and in float64: the same choices, also where two members are
# equally far behind.

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

"""The formulas against published numbers, tables of the chi-square distribution, and sums by
simulation.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tr11ops.goodput.advise import (
    bounds_of_mtbf,
    daly_interval,
    fault_rate,
    more_than,
    share_for_saves,
    share_redone,
    young_interval,
)

HOUR = 3600.0


def test_blooms_interval():
    """384 GPUs lost about one a week, and a save took 40 s: Young says two hours, and three were
    used.
    """
    week = 168 * HOUR
    assert young_interval(week, 40) == pytest.approx(6956, abs=1)
    assert daly_interval(week, 40) == pytest.approx(6956, rel=0.005)
    assert 100 * share_for_saves(3 * HOUR, 40) == pytest.approx(0.4, abs=0.05)
    assert 100 * share_redone(3 * HOUR, week) == pytest.approx(0.9, abs=0.05)
    # 64,500 GPU-hours per failure
    assert fault_rate(0, 0, 384).mtbf == pytest.approx(week, rel=0.001)


@pytest.mark.parametrize(
    ("faults", "low", "high"),
    # 2T / chi-square of 2n + 2 and 2n degrees of freedom at 95 % and 5 %, from printed tables, for
    # T = 100.
    [
        (1, 200 / 9.488, 200 / 0.103),
        (5, 200 / 21.026, 200 / 3.940),
        (10, 200 / 33.924, 200 / 10.851),
    ],
)
def test_the_bounds_are_those_of_the_chi_square_distribution(faults, low, high):
    assert bounds_of_mtbf(100, faults) == pytest.approx((low, high), rel=0.005)


def test_without_a_fault_there_is_only_a_lower_bound():
    low, high = bounds_of_mtbf(100, 0)
    assert low == pytest.approx(100 / 2.996, rel=0.001) and math.isinf(high)  # ln 20


def test_many_faults_are_bounded_too():
    low, high = bounds_of_mtbf(1e6, 1000)
    assert low < 1000 < high and high / low < 1.12


@pytest.mark.parametrize(("mtbf", "save"), [(2000.0, 60.0), (20_000.0, 40.0), (600.0, 100.0)])
def test_dalys_interval_costs_least_in_a_simulation(mtbf, save):
    """Faults come at random, also during saves: neither half nor twice the interval does better."""

    def efficiency(interval):
        draw = random.Random(7)
        done = clock = 0.0
        fault = draw.expovariate(1 / mtbf)
        for _ in range(30_000):
            if clock + interval + save <= fault:
                clock, done = clock + interval + save, done + interval
            else:
                clock, fault = fault, fault + draw.expovariate(1 / mtbf)
        return done / clock

    best = daly_interval(mtbf, save)
    assert efficiency(best) > max(efficiency(best / 2), efficiency(best * 2))


@given(st.floats(1, 1e7), st.floats(1e-3, 1e7))
def test_an_interval_is_never_beyond_reason(mtbf, save):
    assert 0 < daly_interval(mtbf, save) <= mtbf + 1e-6 or save < 2 * mtbf
    assert daly_interval(mtbf, save) > 0


@given(st.integers(0, 200), st.floats(0, 200))
def test_the_tail_is_a_probability_and_falls(count, expected):
    tail = more_than(count, expected)
    assert 0 <= tail <= 1
    assert more_than(count + 1, expected) <= tail + 1e-9


def test_the_tail_of_a_few():
    assert more_than(0, 1.0) == pytest.approx(1 - math.exp(-1))
    assert more_than(1, 2.0) == pytest.approx(1 - 3 * math.exp(-2))
    assert more_than(5, 0.0) == 0


def test_a_runs_own_count_is_taken_once_it_says_enough():
    few, own, given_ = fault_rate(6e7, 4, 8), fault_rate(1e6, 5, 8), fault_rate(1e6, 5, 8, 42.0)
    assert few.mtbf == 64_500 * HOUR / 8 and "only 4 faults" in few.source
    assert (own.mtbf, own.source) == (2e5, "measured")
    assert (given_.mtbf, given_.source) == (42.0, "as given")


def test_a_few_faults_that_rule_out_the_assumed_rate_count():
    """Three faults in 2.6 node-hours: one fault in 223 days is not what this run meets."""
    seen = fault_rate(2.6 * HOUR, 3, 8)
    assert (
        seen.mtbf == pytest.approx(2.6 * HOUR / 3)
        and not seen.low <= 64_500 * HOUR / 8 <= seen.high
    )
    assert seen.source == "measured from 3 faults alone, which rule out BLOOM's rate"
    assert fault_rate(2.6 * HOUR, 0, 8).mtbf == 64_500 * HOUR / 8  # no fault rules out nothing

"""What is advised after made-up pasts, and what it would have saved there; and the formulas behind it,
against published numbers, tables of the chi-square distribution, and sums by simulation.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.tr11ops.goodput.past import BEGIN, Past
from tr11ops.goodput.account import Goodput, account
from tr11ops.goodput.advise import (
    Advice,
    CardSettings,
    advise,
    bounds_of_mtbf,
    daly_interval,
    fault_rate,
    measure,
    more_than,
    recorded_launches,
    replay,
    share_for_saves,
    share_redone,
    stretches,
    too_little,
    young_interval,
)
from tr11ops.goodput.history import read_history
from tr11ops.goodput.history_values import History
from tr11ops.goodput.timeline import Bucket

NODES = tuple(f"n{number}" for number in range(1, 5))
CARD = CardSettings(
    nodes=3, spares=1, gpus_per_node=8, task_seconds=3600.0, time_limit=4000.0, save_every=10, room=400.0,
    evaluates=False, remaining=1000,
)  # fmt: skip


def faulty(
    past: Past, faults: int = 6, length: float = 990.0, cause: str = "node"
) -> tuple[History, Goodput]:
    """Attempts that each train 99 steps of 10 s, save twice (20 s each, after 40 and 80), and lose
    the rest.
    """
    at = 0.0
    past.submit(0, "20260921-000000-00000001", 4, f"1-{faults}%1")
    done = 0
    for number in range(faults):
        at += 100
        past.attempt(at, str(101 + number), NODES, "20260921-000000-00000001")
        past.launch(at, 1, NODES[:3])
        past.phase(at, "starting", 0)
        past.phase(at + 30, "loading", 0)
        past.phase(at + 50, "training", done)
        at = past.steps(at + 50, done + 1, done + 40, 10)
        past.save(at, at + 20)
        past.phase(at + 20, "training")
        at = past.steps(at + 20, done + 41, done + 80, 10)
        past.save(at, at + 20)
        past.phase(at + 20, "training")
        at = past.steps(at + 20, done + 81, done + 99, 10)
        done += 80
        past.failed(at, at + 5, cause)
        past.verdict(at + 5, "error", done, cause)
        at += 5
    history = read_history(past.directory, ())
    return history, account(history, BEGIN + at)


def by_topic(found: tuple[Advice, ...]) -> dict[str, Advice]:
    return {advice.topic: advice for advice in found}


def test_the_run_is_measured_as_it_was(tmp_path):
    history, goodput = faulty(Past(tmp_path))
    found = measure(history, goodput, CARD)
    assert (found.step, found.save, found.saves, found.longest_save) == (10, 20, 12, 20)
    assert (found.start, found.queue) == (50, 100)
    assert found.faults.source == "measured" and found.faults.mtbf == pytest.approx(
        50 + 990 + 40 + 5
    )
    assert found.node_faults.mtbf == pytest.approx(4 * (50 + 990 + 40 + 5))
    assert found.useful_rate == pytest.approx(800 / 1085)


def test_the_interval_is_dalys_and_its_saving_is_recomputed(tmp_path):
    history, goodput = faulty(Past(tmp_path))
    advice = by_topic(advise(history, goodput, CARD))["save interval"]
    # Young: sqrt(2 * 1085 * 20) = 208.3 s; Daly: 208.3 * (1 + 0.096 / 3 + 0.0092 / 9) - 20 = 195 s,
    # of 10 s steps
    assert advice.change == "checkpoint.interval = 20"
    assert advice.numbers["young_seconds"] == pytest.approx(208.3, abs=0.1)
    # In each of six launches of 990 s: now 9 saves and 90 s lost, then 4 saves and 190 s; three
    # nodes and a spare.
    assert advice.saved_node_hours == pytest.approx(6 * 4 * ((9 * 20 + 90) - (4 * 20 + 190)) / 3600)


def test_the_replay_of_what_was_done_costs_what_it_cost(tmp_path):
    """The model and the account agree on a past in which every save was made when the card says."""
    _, goodput = faulty(Past(tmp_path))
    recorded = goodput.buckets[Bucket.SAVE].node_micros + goodput.buckets[Bucket.REDONE].node_micros
    assert replay(list(recorded_launches(goodput)), 400.0, 20.0) == pytest.approx(recorded / 3.6e9)


def test_nothing_is_advised_from_too_short_a_past(tmp_path):
    """Two faults in 36 minutes: no rate follows from that, nor from a rate that a person gives."""
    history, goodput = faulty(Past(tmp_path), faults=2)
    for situation in (CARD, replace(CARD, given_mtbf=5000.0)):
        found = by_topic(advise(history, goodput, situation))
        for topic in ("save interval", "spares", "array"):
            assert (found[topic].better, found[topic].change, found[topic].numbers) == (
                "cannot tell",
                "",
                {},
            ), topic
            assert found[topic].why == (
                "36 min with nodes and 2 faults are too little: 24 h or 5 faults are needed",
            )
        assert found["exit margin"].numbers["needed_seconds"] == 30  # what it must hold is no rate


def test_few_faults_in_a_long_past_are_said_and_the_prior_taken(tmp_path):
    history, goodput = faulty(Past(tmp_path), faults=2)
    measured = measure(history, goodput, CARD)
    long = replace(
        goodput, spans=tuple(span._replace(end=span.start + 10**12) for span in goodput.spans)
    )
    assert too_little(long) == ""
    assert "rule out" in measured.faults.source
    given = replace(CARD, given_mtbf=5000.0)
    assert by_topic(advise(history, long, given))["save interval"].numbers["mtbf_seconds"] == 5000.0


def test_each_advice_can_be_typed(tmp_path):
    history, goodput = faulty(Past(tmp_path))
    found = by_topic(advise(history, goodput, replace(CARD, room=20.0)))
    assert found["save interval"].option == "--set checkpoint.interval=20"
    assert found["spares"].option == f"--set slurm.spare_nodes={found['spares'].better}"
    assert found["array"].option == "tr11 launch --array 1-4"
    assert found["exit margin"].option == "--set run.exit_duration_minutes=65"
    short = replace(CARD, room=20.0, time_limit=60.0, task_seconds=60.0)
    assert (
        by_topic(advise(history, goodput, short))["exit margin"].option
        == "--set slurm.time_limit=00:03:00"
    )


def test_spares_cost_as_little_as_can_be(tmp_path):
    history, goodput = faulty(Past(tmp_path))
    advice = by_topic(advise(history, goodput, CARD))["spares"]
    expected = 3 * 3600 / (4 * 1085)
    exchange = 100 + 50
    costs = [
        spares * 3600 + more_than(spares, expected) * exchange * (3 + spares)
        for spares in range(10)
    ]
    assert advice.better == str(costs.index(min(costs)))
    assert advice.numbers["runs_out_now"] == pytest.approx(more_than(1, expected))
    assert advice.saved_node_hours == pytest.approx(
        6 * 1085 / 3600 * (costs[1] - min(costs)) / 3600
    )


def test_a_long_queue_calls_for_spares(tmp_path):
    history, goodput = faulty(Past(tmp_path))
    days = tuple(
        span._replace(start=span.start - 10**12) if span.bucket is Bucket.QUEUE else span
        for span in goodput.spans
    )
    few = by_topic(advise(history, replace(goodput, spans=days), CARD))["spares"]
    assert int(few.better) >= 5


def test_the_tasks_to_the_end_count_what_is_lost_on_the_way(tmp_path):
    history, goodput = faulty(Past(tmp_path))
    advice = by_topic(advise(history, goodput, CARD))["array"]
    # 1000 steps of 10 s, of which 800 in 1085 s are kept: 13,562 s, 3600 s a task
    assert advice.numbers["tasks"] == 4
    assert advice.change == "tr11 launch --array 1-4"
    # larger batches are to come: as long as 2,500 of the recent steps
    ramp = replace(CARD, recent_steps_left=2500.0)
    assert by_topic(advise(history, goodput, ramp))["array"].numbers["tasks"] == 10


def test_the_margin_holds_a_step_and_the_longest_save(tmp_path):
    history, goodput = faulty(Past(tmp_path))
    enough = by_topic(advise(history, goodput, CARD))["exit margin"]
    assert (enough.change, enough.numbers["needed_seconds"]) == ("", 30)
    tight = by_topic(advise(history, goodput, replace(CARD, room=20.0)))["exit margin"]
    # 4000 s less 30 s, in whole minutes, and one to spare
    assert tight.change == "run.exit_duration_minutes = 65"


def test_a_run_that_did_nothing_is_told_so(tmp_path):
    past = Past(tmp_path)
    past.submit(0, "20260921-000000-00000001", 4)
    history = read_history(past.directory, ())
    found = by_topic(advise(history, account(history, BEGIN + 100), CARD))
    assert found["save interval"].better == found["array"].better == "cannot tell"
    assert "exit margin" not in found


def test_a_stretch_goes_on_where_only_its_nodes_change(tmp_path):
    _, goodput = faulty(Past(tmp_path), faults=1)
    spans = list(goodput.spans)
    save = next(span for span in spans if span.bucket is Bucket.SAVE)
    middle = (save.start + save.end) // 2
    cut = [save._replace(end=middle), save._replace(start=middle, nodes=3)]
    assert stretches([span for span in spans if span is not save] + cut, (Bucket.SAVE,)) == [20, 20]


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

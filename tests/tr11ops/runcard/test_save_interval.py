"""How often a launch saves: never less often than the card says, and as the run's own record calls for."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.runcard.card import CardError, OwnCard, RunCard, load_card, shipped_folder
from tr11ops.runcard.save_interval import (
    FEWEST_RECENT,
    RECENT_SECONDS,
    FaultRecord,
    SaveInterval,
    best_interval,
    chosen_interval,
    save_times,
    time_between_faults,
)
from tr11ops.runcard.speed import RunHistory

DAY = 86_400.0
NOW = 1_700_000_000.0
ROOM = 10**16  # bytes: more than anyone has
ADAPTS = (
    "resilience.adapt_save_interval=true",
    "backup.prune=true",
    "backup.store=/archive",
)
MEASURED = RunHistory(step=105.0, save=60.0, usual_save=40.0, stall=5.0)


def big(*overrides: str) -> RunCard:
    path = shipped_folder() / "tr11-176B-ml.toml"
    return load_card(path, [*ADAPTS, *overrides], {}, keep_undefined=True)


def faults(*days_ago: float) -> FaultRecord:
    return FaultRecord(100 * DAY, tuple(NOW - days * DAY for days in days_ago))


def stands(found: SaveInterval | None) -> bool:
    """Whether the card's own interval does."""
    return found is not None and found.minutes is None


def test_the_interval_is_youngs_for_the_measured_standstill() -> None:
    card = big()
    met = faults(90, 70, 50, 30)
    found = chosen_interval(card, MEASURED, met, ROOM, NOW)
    assert found is not None
    # BLOOM's 168 hours count as the time of one more fault
    between = (64_500 * 3600 / 384 + 100 * DAY) / 5
    assert found.minutes == pytest.approx(math.sqrt(2 * between * 5.0) / 60, abs=0.01)
    assert "a save stops the steps for 5.0 s" in found.why


def test_faults_in_a_burst_shorten_it_and_it_grows_again() -> None:
    gpus = 384
    old = time_between_faults(faults(90, 70, 50, 30), gpus, NOW)
    burst = time_between_faults(faults(90, 70, 50, 30, 2, 1, 0.5, 0.1), gpus, NOW)
    assert burst == RECENT_SECONDS / 4 < old
    later = time_between_faults(faults(90, 70, 50, 30, 2, 1, 0.5, 0.1), gpus, NOW + RECENT_SECONDS)
    assert later == pytest.approx((64_500 * 3600 / gpus + 100 * DAY) / 9)
    assert time_between_faults(faults(*[1.0] * (FEWEST_RECENT - 1)), gpus, NOW) > RECENT_SECONDS


def test_the_cards_own_interval_is_never_exceeded() -> None:
    # a synchronous save of ten minutes calls for more than the card's 100 iterations
    slow = RunHistory(step=105.0, save=600.0, usual_save=600.0, stall=600.0)
    found = chosen_interval(big(), slow, FaultRecord(), ROOM, NOW)
    assert str(found).startswith("the training saves as often as its card says: one fault in 6 d")
    often = big("checkpoint.interval=2")
    assert stands(chosen_interval(often, MEASURED, FaultRecord(), ROOM, NOW))


def test_saves_do_not_crowd_the_disk() -> None:
    found = chosen_interval(big(), MEASURED, FaultRecord(), ROOM, NOW)
    # room for 20 checkpoints of 2.3 TB, of which half may be filled in the 24 hours to the next round
    short = chosen_interval(big(), MEASURED, FaultRecord(), 20 * 2_310_000_000_000, NOW)
    assert found is not None and short is not None
    assert short.minutes == pytest.approx(24 * 60 / 10, rel=0.12)
    assert "not removed sooner" in short.why
    # no room for one, or none that is known: as the card says
    assert stands(chosen_interval(big(), MEASURED, FaultRecord(), 10**12, NOW))
    unknown = chosen_interval(big(), MEASURED, FaultRecord(), None, NOW)
    assert stands(unknown) and "is known yet" in str(unknown)


def test_a_checkpoint_is_written_a_tenth_of_the_time_at_most() -> None:
    burst = faults(*[0.1] * 500)
    found = chosen_interval(big(), MEASURED, burst, ROOM, NOW)
    assert found is not None
    assert found.minutes == pytest.approx(10 * 40 / 60, abs=0.01)


def test_before_the_first_save_its_times_are_assumed() -> None:
    card = big("checkpoint.asynchronous=true", "checkpoint.format=tr11")
    waits = big("checkpoint.asynchronous=false", "checkpoint.format=tr11")
    assert isinstance(card, OwnCard) and isinstance(waits, OwnCard)
    stall, written = save_times(card, RunHistory())
    assert stall == pytest.approx(0.13 * written)
    assert save_times(waits, RunHistory()) == (written, written)


def test_without_the_key_nothing_is_chosen() -> None:
    off = big("resilience.adapt_save_interval=false")
    assert chosen_interval(off, MEASURED, faults(1, 1, 1), ROOM, NOW) is None


@pytest.mark.parametrize("lacks", ["backup.prune=false", "backup.store=none"])
def test_a_card_whose_old_checkpoints_stay_is_refused(tmp_path: Path, lacks: str) -> None:
    card = write_card(tmp_path)
    load_card(card, ADAPTS, {})
    with pytest.raises(CardError, match=r"adapt_save_interval.*needs rounds that remove"):
        load_card(card, (*ADAPTS, lacks), {})


# ----------------------------------------------------------------------------- Young and Daly
WEEK = 7 * DAY


def test_blooms_interval() -> None:
    """384 GPUs lost about one a week, and a save took 40 s: one each 116 minutes."""
    assert best_interval(WEEK, 40.0) / 60 == pytest.approx(115.9, abs=0.1)


def dalys_interval(between: float, stall: float) -> float:
    """The estimate of higher order (equation 37), with the save that it leaves out."""
    ratio = stall / (2 * between)
    return math.sqrt(2 * stall * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


def efficiency(between: float, stall: float, interval: float) -> float:
    """The share of the time that trains what is kept, where faults come at random, also in saves."""
    return (interval - stall) / (between * math.expm1(interval / between))


@pytest.mark.parametrize("between", [DAY / 8, DAY, WEEK])
@pytest.mark.parametrize("stall", [0.2, 5.2, 40.0, 300.0])
def test_the_higher_order_is_worth_nothing(between: float, stall: float) -> None:
    young, daly = best_interval(between, stall), dalys_interval(between, stall)
    assert daly - young == pytest.approx(stall / 3, rel=0.05)
    # of the time: less than a twentieth of a percent where a fault comes each three hours, and a
    # save stops the steps for five minutes
    gained = efficiency(between, stall, daly) - efficiency(between, stall, young)
    assert abs(gained) < 5e-4
    if stall <= 40.0:
        assert abs(gained) < 1e-5


@pytest.mark.parametrize(("between", "stall"), [(2000.0, 60.0), (20_000.0, 40.0), (600.0, 100.0)])
def test_the_interval_costs_least_in_a_simulation(between: float, stall: float) -> None:
    """Neither half nor twice the interval does better."""

    def played(interval: float) -> float:
        draw = random.Random(7)
        done = clock = 0.0
        fault = draw.expovariate(1 / between)
        for _ in range(30_000):
            if clock + interval <= fault:
                clock, done = clock + interval, done + interval - stall
            else:
                clock, fault = fault, fault + draw.expovariate(1 / between)
        return done / clock

    best = best_interval(between, stall)
    assert played(best) > max(played(best / 2), played(best * 2))

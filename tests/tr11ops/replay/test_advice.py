"""What other settings would have given a run, by replays of its record."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tr11ops.base.observed import Unknown
from tr11ops.goodput.advise import CardSettings
from tr11ops.replay.advice import (
    INTERVAL,
    MOST_REPLAYS,
    SPARES,
    Gain,
    is_gain,
    replay_advice,
    settings_of,
)
from tr11ops.replay.own_record import RecordedFault, RecordedRun
from tr11ops.replay.parameters import Layout, Parameters
from tr11ops.replay.production import production_score
from tr11ops.replay.traces import DAY, Fault, FaultSign
from tr11ops.replay.world import Score

NODES = tuple(f"n{number:03d}" for number in range(1, 9))
DAYS = 4


def fault(number: int, day: float) -> RecordedFault:
    start = day * DAY
    one = Fault(NODES[number % 4], start, start + 1, FaultSign.CRASH, "as recorded", unseen=0.0)
    return RecordedFault(one, start + 60.0)


def recorded(interval: int, trained: float) -> RecordedRun:
    """A worker dies each half day; a step is 100 s, a save 20 s."""
    return RecordedRun(
        NODES,
        DAYS * DAY,
        tuple(fault(number, 0.37 + number / 2) for number in range(2 * DAYS - 1)),
        Layout(4, 4, 2),
        Parameters(step=100.0, save=20.0, interval=interval, evaluation=0.0, quiet_looks=24),
        trained,
        left_out=0.0,
        days=14.0,
        least_spares=0,
    )


def situation(interval: int) -> CardSettings:
    return CardSettings(
        nodes=4, spares=2, task_seconds=359_400.0, time_limit=360_000.0, save_every=interval,
        room=600.0, evaluates=False, remaining=None,
    )  # fmt: skip


def test_saves_that_are_far_apart_are_found_and_what_others_would_have_gained() -> None:
    """432 steps from fault to fault, and a save each 300: of 3,456 steps, 7 times 300 are kept, and
    the last 544.
    """
    done: list[str] = []
    check, found = replay_advice(recorded(300, (7 * 300 + 544) / 3456), situation(300), done.append)
    assert check is not None and check.is_near, check
    assert len(done) <= MOST_REPLAYS
    advice = {one.topic: one for one in found}[INTERVAL]
    # Young: sqrt(2 * 20 * 49,371) = 1,405 s less 20 s of the save, and so 14 steps
    assert advice.change == "checkpoint.interval = 14"
    gained = advice.numbers["gained_percent"]
    assert gained is not None and 10 < gained < 40
    low, high = advice.numbers["gained_percent_low"], advice.numbers["gained_percent_high"]
    assert low is not None and high is not None and 0 < low <= high
    assert any(line.startswith("14 iterations (23 min): +") for line in advice.why)
    assert any(line.startswith("600 iterations") and ": -" in line for line in advice.why)


def test_a_replay_that_is_far_from_what_happened_advises_nothing() -> None:
    done: list[str] = []
    check, found = replay_advice(recorded(14, 0.40), situation(14), done.append)
    assert check is not None and not check.is_near and len(done) == 1
    assert {one.better for one in found} == {"cannot tell"}
    assert "points off what happened" in found[0].why[0]
    assert "40.00 % of the time trained what was kept" in str(check)
    assert " faults in 27 min; " in str(replace(check, days=0.019)), "never in 0 days"


def test_what_cannot_be_replayed_is_told_for_each_setting() -> None:
    why = "the run has seen 1 fault in 12 d 3 h, 5 are needed"
    check, found = replay_advice(Unknown(why), situation(14), print)
    assert check is None
    assert [(one.now, one.better, one.why) for one in found] == [
        ("14 iterations", "cannot tell", (why,)),
        ("2", "cannot tell", (why,)),
        ("14 d", "cannot tell", (why,)),
    ]


def test_a_run_that_adapts_is_replayed_at_the_intervals_that_its_launches_choose() -> None:
    """The card's 300 steps lose all between two faults; chosen, some 20 to 40 steps lie between saves."""
    run = recorded(300, 0.6)
    adapting = replace(run.parameters, adapts=True, free_checkpoints=1000.0)
    fixed, chosen, full = (
        production_score(
            run.as_recorded(), run.layout, parameters=times, overrides=run.card_overrides
        )
        for times in (run.parameters, adapting, replace(adapting, free_checkpoints=1.0))
    )
    assert chosen.percent > fixed.percent + 10
    assert full.percent == fixed.percent  # no room for more


def test_what_is_tried() -> None:
    run = recorded(14, 0.9)
    found = {one.change: one.run for one in settings_of(run)}
    assert set(found) == {
        "slurm.spare_nodes = 1", "slurm.spare_nodes = 3", "slurm.spare_nodes = 4",
        "resilience.exclusion_days = 7", "resilience.exclusion_days = 28",
        "checkpoint.interval = 7", "checkpoint.interval = 28",
    }  # fmt: skip
    assert found["slurm.spare_nodes = 4"].layout == Layout(4, 4, 4)
    assert "resilience.exclusion_days=7" in found["resilience.exclusion_days = 7"].card_overrides
    none = settings_of(replace(run, layout=Layout(4, 4, 0)))
    assert [one.value for one in none if one.topic == SPARES] == ["1", "2"]


def test_a_gain_by_hand() -> None:
    """100 h of 4 nodes: 80 % useful, then 90 % with 20 node-hours more."""
    run = replace(recorded(14, 0.8), seconds=100 * 3600.0)
    before, after = (
        Score(
            "tr11", "", effective, wasted=wasted, acts=0, mails=0, innocent=0, excluded=0, burned=0,
            tasks=1, launches=1, iterations=1, waited_hours=0, faults=0, lost_percent={},
        )
        for effective, wasted in ((0.8, 80.0), (0.9, 60.0))
    )  # fmt: skip
    gain = Gain.between(run, before, after)
    assert gain.percent == pytest.approx(10)
    assert gain.held == pytest.approx(420 - 400)
    assert gain.saved == pytest.approx(400 * 0.9 / 0.8 - 420)
    assert is_gain(gain, 400.0)
    assert not is_gain(replace(gain, saved=0.7), 400.0)  # 0.2 % of 400 are 0.8
    assert not is_gain(replace(gain, percent=-0.01), 400.0)

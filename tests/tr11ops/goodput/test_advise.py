"""What is advised of tasks and margin after made-up pasts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.tr11ops.goodput.past import BEGIN, Past
from tr11ops.goodput.account import Goodput, account
from tr11ops.goodput.advise import (
    Advice,
    CardSettings,
    advise,
    measure,
    stretches,
    too_little,
)
from tr11ops.goodput.history import read_history
from tr11ops.goodput.history_values import History
from tr11ops.goodput.timeline import Bucket

NODES = tuple(f"n{number}" for number in range(1, 5))
CARD = CardSettings(
    nodes=3, spares=1, task_seconds=3600.0, time_limit=4000.0, save_every=10, room=400.0,
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


def advised(history: History, goodput: Goodput, situation: CardSettings) -> dict[str, Advice]:
    found = advise(measure(history, goodput), goodput, situation)
    return {advice.topic: advice for advice in found}


def test_the_run_is_measured_as_it_was(tmp_path):
    history, goodput = faulty(Past(tmp_path))
    found = measure(history, goodput)
    assert (found.step, found.save, found.saves, found.longest_save) == (10, 20, 12, 20)
    assert (found.start, found.queue) == (50, 100)
    assert found.useful_rate == pytest.approx(800 / 1085)


def test_nothing_is_advised_from_too_short_a_past(tmp_path):
    """Two faults in 36 minutes: no rate follows from that, nor from a rate that a person gives."""
    history, goodput = faulty(Past(tmp_path), faults=2)
    found = advised(history, goodput, CARD)
    assert (found["array"].better, found["array"].change, found["array"].numbers) == (
        "cannot tell",
        "",
        {},
    )
    assert found["array"].why == (
        "36 min with nodes and 2 faults are too little: 24 h or 5 faults are needed",
    )
    assert found["exit margin"].numbers["needed_seconds"] == 30  # what it must hold is no rate
    long = replace(
        goodput, spans=tuple(span._replace(end=span.start + 10**12) for span in goodput.spans)
    )
    assert too_little(long) == ""


def test_each_advice_can_be_typed(tmp_path):
    history, goodput = faulty(Past(tmp_path))
    found = advised(history, goodput, replace(CARD, room=20.0))
    assert found["array"].option == "tr11 launch --array 1-4"
    assert found["exit margin"].option == "--set run.exit_duration_minutes=65"
    short = replace(CARD, room=20.0, time_limit=60.0, task_seconds=60.0)
    assert (
        advised(history, goodput, short)["exit margin"].option == "--set slurm.time_limit=00:03:00"
    )


def test_the_tasks_to_the_end_count_what_is_lost_on_the_way(tmp_path):
    history, goodput = faulty(Past(tmp_path))
    advice = advised(history, goodput, CARD)["array"]
    # 1000 steps of 10 s, of which 800 in 1085 s are kept: 13,562 s, 3600 s a task
    assert advice.numbers["tasks"] == 4
    assert advice.change == "tr11 launch --array 1-4"
    # larger batches are to come: as long as 2,500 of the recent steps
    ramp = replace(CARD, recent_steps_left=2500.0)
    assert advised(history, goodput, ramp)["array"].numbers["tasks"] == 10


def test_the_margin_holds_a_step_and_the_longest_save(tmp_path):
    history, goodput = faulty(Past(tmp_path))
    enough = advised(history, goodput, CARD)["exit margin"]
    assert (enough.change, enough.numbers["needed_seconds"]) == ("", 30)
    tight = advised(history, goodput, replace(CARD, room=20.0))["exit margin"]
    # 4000 s less 30 s, in whole minutes, and one to spare
    assert tight.change == "run.exit_duration_minutes = 65"


def test_a_run_that_did_nothing_is_told_so(tmp_path):
    past = Past(tmp_path)
    past.submit(0, "20260921-000000-00000001", 4)
    history = read_history(past.directory, ())
    found = advised(history, account(history, BEGIN + 100), CARD)
    assert found["array"].better == "cannot tell"
    assert "exit margin" not in found


def test_a_stretch_goes_on_where_only_its_nodes_change(tmp_path):
    _, goodput = faulty(Past(tmp_path), faults=1)
    spans = list(goodput.spans)
    save = next(span for span in spans if span.bucket is Bucket.SAVE)
    middle = (save.start + save.end) // 2
    cut = [save._replace(end=middle), save._replace(start=middle, nodes=3)]
    assert stretches([span for span in spans if span is not save] + cut, (Bucket.SAVE,)) == [20, 20]

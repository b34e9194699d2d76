"""A run's own record as a replay takes it: by hand, read back from a replay that left one, and where
it says too little.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.goodput.past import BEGIN, Past
from tests.tr11ops.replay.played_record import PlayedRecord
from tr11ops.base.observed import Observed, Unknown, seen
from tr11ops.goodput.account import account
from tr11ops.goodput.advise import CardSettings, measure
from tr11ops.goodput.history import read_history
from tr11ops.replay.own_record import RecordedRun, recorded_run
from tr11ops.replay.parameters import Layout, Parameters
from tr11ops.replay.production import production_score
from tr11ops.replay.traces import DAY, Fault, FaultSign, Window, read_trace, window

NODES = ("n1", "n2", "n3", "n4")
TAG = "20260921-000000-00000001"
CARD = CardSettings(
    nodes=3, spares=1, task_seconds=3600.0, time_limit=4000.0, save_every=40, room=400.0,
    evaluates=False, remaining=1000,
)  # fmt: skip
TRACES = Path(os.environ.get("TR11_TRACES", Path(__file__).parents[4] / "shared/data/traces"))


def failing(past: Past, faults: int) -> float:
    """Attempts, each 100 s after the last: 50 s of start, 40 steps of 10 s, a save of 20 s, 10 steps
    that are lost, 30 s of silence, and 5 s until the launch is over. n2 is blamed for all; the
    second one left it out. Returns when the last one ended.
    """
    at = 0.0
    past.submit(0, TAG, 4, f"1-{faults}%1")
    for number in range(faults):
        at += 100
        past.attempt(at, str(101 + number), NODES, TAG)
        past.launch(at, 1, NODES[:3] if number != 1 else ("n1", "n3", "n4"))
        past.phase(at, "starting", 0)
        past.phase(at + 30, "loading", 0)
        past.phase(at + 50, "training", 40 * number)
        at = past.steps(at + 50, 40 * number + 1, 40 * number + 40, 10)
        past.save(at, at + 20)
        past.phase(at + 20, "training")
        at = past.steps(at + 20, 40 * number + 41, 40 * number + 50, 10) + 40
        past.failed(at, at + 5, "node", [] if number == 1 else ["n2"])
        past.verdict(at + 5, "error", 40 * number + 40, "node")
        at += 5
    return at


def read(past: Past, end: float, card: CardSettings = CARD) -> Observed[RecordedRun]:
    history = read_history(past.directory, ())
    goodput = account(history, BEGIN + end)
    return recorded_run(history, goodput, card, measure(history, goodput))


def test_a_made_up_record_by_hand(tmp_path: Path) -> None:
    past = Past(tmp_path)
    run = seen(read(past, failing(past, 6)))
    # from the first attempt on: six of 50 + 400 + 20 + 100 + 40 + 5 s, and five waits of 100 s
    assert (run.nodes, run.left_out) == (NODES, 0)
    assert run.seconds == pytest.approx(6 * 615 + 500)
    assert run.trained == pytest.approx(6 * 400 / 4190)
    assert run.layout == Layout(3, 1, 1)
    times = run.parameters
    assert (times.step, times.save, times.interval) == (10, 20, 40)
    assert (times.start_up, times.ends_within) == (50, 5)
    assert times.next_task == pytest.approx(100)
    # a wait after the last attempt, which goes on, is no task's
    assert seen(read(past, 6 * 715 + 10_000)).seconds == run.seconds
    first, second, third = run.faults[:3]
    # 40 s passed after the last step, one of which the next step would have taken 10
    assert first.fault.unseen == pytest.approx(30)
    assert first.fault.start == pytest.approx(50 + 400 + 20 + 100 + 40 - 30)
    assert (first.fault.node, first.fault.kind) == ("n2", FaultSign.HARDWARE)
    # n2 trained no more without a fault
    assert first.latest == run.seconds
    assert (second.fault.kind, second.fault.node) == (FaultSign.SHARED, "")
    assert third.fault.start - first.fault.start == pytest.approx(2 * 715)


def test_time_for_which_a_person_was_waited_is_left_out(tmp_path: Path) -> None:
    past = Past(tmp_path)
    end = failing(past, 6)
    plain = seen(read(past, end))
    past.journal(720, "pause")  # between the first and the second attempt
    past.journal(780, "resumed", switches=["pause"])
    run = seen(read(past, end))
    assert run.left_out == pytest.approx(60)
    assert run.seconds == pytest.approx(plain.seconds - 60)
    assert run.faults[1].fault.start == pytest.approx(plain.faults[1].fault.start - 60)
    assert run.parameters.next_task == pytest.approx(440 / 5)


@pytest.mark.parametrize(
    ("card", "why"),
    [
        (replace(CARD, save_every=None), "the card does not say how often the training saves"),
        (replace(CARD, nodes=48), "no launch has trained on 48 nodes yet"),
    ],
)
def test_what_the_card_does_not_say_is_unknown(
    tmp_path: Path, card: CardSettings, why: str
) -> None:
    past = Past(tmp_path)
    assert read(past, failing(past, 6), card) == Unknown(why)


def test_too_few_faults_are_said_with_their_number_and_time(tmp_path: Path) -> None:
    past = Past(tmp_path)
    end = failing(past, 4)
    found = read(past, end)
    assert isinstance(found, Unknown)
    assert found.why.startswith("the run has seen 4 faults in ")
    assert found.why.endswith(", 5 are needed")
    assert not isinstance(read(past, end, replace(CARD, given_mtbf=3600.0)), Unknown)
    history = read_history(past.directory, ())
    goodput = account(history, BEGIN + end)
    long = replace(
        goodput, spans=tuple(span._replace(end=span.end * 2 - span.start) for span in goodput.spans)
    )
    assert isinstance(recorded_run(history, long, CARD, measure(history, long)), Unknown)


def test_what_was_saved_by_a_job_that_is_only_watched_is_unknown(tmp_path: Path) -> None:
    past = Past(tmp_path)
    end = failing(past, 6)
    history = replace(
        read_history(past.directory, ()), checkpoints=Unknown("not looked at: level 0")
    )
    goodput = account(history, BEGIN + end)
    found = recorded_run(history, goodput, CARD, measure(history, goodput))
    assert found == Unknown("what was saved is not known: not looked at: level 0")


def test_an_empty_record_is_unknown(tmp_path: Path) -> None:
    found = read(Past(tmp_path), 100.0)
    assert isinstance(found, Unknown)


def test_resampling_is_the_same_for_a_seed_and_comes_as_often_as_asked(tmp_path: Path) -> None:
    past = Past(tmp_path)
    run = seen(read(past, failing(past, 6)))
    assert run.resampled(3) == run.resampled(3) != run.resampled(4)
    wide = replace(run, layout=Layout(3, 3, 3))
    assert wide.all_nodes == (*NODES, "never-held-1", "never-held-2")
    own = [fault for fault in wide.resampled(3).faults if fault.node in ("", *NODES)]
    assert own == list(run.resampled(3).faults)
    counts = [len(run.resampled(seed, run.seconds / 60).faults) for seed in range(200)]
    assert sum(counts) / len(counts) == pytest.approx(60, rel=0.1)
    for fault in run.resampled(3).faults:
        assert 0 <= fault.start < run.seconds and fault.end > fault.start


# ----------------------------------------------------------------------------- read back
def as_of(layout: Layout, times: Parameters) -> CardSettings:
    return CardSettings(
        nodes=layout.nodes, spares=layout.held, task_seconds=times.time_limit - times.leaves_before,
        time_limit=times.time_limit, save_every=times.interval, room=times.leaves_before,
        evaluates=True, remaining=1000, least_spares=0,
    )  # fmt: skip


def read_back(played: PlayedRecord, layout: Layout, times: Parameters) -> RecordedRun:
    found = measure(played.history, played.goodput)
    return seen(recorded_run(played.history, played.goodput, as_of(layout, times), found))


def test_what_a_replay_has_left_is_read_back_as_its_faults(tmp_path: Path) -> None:
    layout, times = Layout(4, 4, 2), Parameters()
    nodes = tuple(f"n{number:03d}" for number in range(1, 9))
    faults = (
        Fault("n001", 1.0 * DAY, 1.5 * DAY, FaultSign.HARDWARE),
        Fault("n002", 2.0 * DAY, 2.01 * DAY, FaultSign.CRASH),
        Fault("", 2.5 * DAY, 2.5 * DAY + 1, FaultSign.SHARED, "a shape does not fit"),
        Fault("n004", 3.0 * DAY, 3.2 * DAY, FaultSign.LOSS),
        Fault("n005", 3.6 * DAY, 3.7 * DAY, FaultSign.HARDWARE),
    )
    played = PlayedRecord(tmp_path, Window(nodes, 5 * DAY, faults), layout, times)
    run = read_back(played, layout, times)
    told = [(one.fault.node, one.fault.kind) for one in run.faults]
    assert told == [(fault.node, fault.kind) for fault in faults]
    for one, fault in zip(run.faults, faults, strict=True):
        assert one.fault.start == pytest.approx(fault.start, abs=times.step)
        assert one.fault.start <= one.latest
    score = production_score(
        run.as_recorded(), run.layout, parameters=run.parameters, overrides=run.card_overrides
    )
    evaluations = played.score.lost_percent["evaluations"]
    assert 100 * run.trained == pytest.approx(played.score.percent + evaluations, abs=0.1)
    assert score.percent == pytest.approx(100 * run.trained, abs=0.3)


def test_a_part_of_a_real_trace_is_read_back_with_its_totals(tmp_path: Path) -> None:
    trace = TRACES / "fault_trace.json"
    if not trace.exists():
        pytest.skip(f"no {trace.name} here; docs/how-to/replay.md says where it is")
    layout, times = Layout(), Parameters()
    part = window(read_trace(trace), layout.all, 40 * DAY, 2)
    played = PlayedRecord(tmp_path, part, layout, times)
    run = read_back(played, layout, times)
    lost = played.score.lost_percent
    assert 100 * run.trained == pytest.approx(played.score.percent + lost["evaluations"], abs=0.1)
    assert len(run.faults) >= 5
    score = production_score(
        run.as_recorded(), run.layout, parameters=run.parameters, overrides=run.card_overrides
    )
    assert score.percent == pytest.approx(100 * run.trained, abs=1.0)

"""The account of made-up pasts whose truth is known, and its sums for any past at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.goodput.eventful import NODES, SECOND, TAG, eventful
from tests.tr11ops.goodput.past import BEGIN, Past
from tr11ops.base.observed import Unknown, known
from tr11ops.cluster.base import Job, JobState
from tr11ops.goodput.account import Goodput, account, held_micros
from tr11ops.goodput.history import read_attempts_alone, read_history
from tr11ops.goodput.timeline import Bucket
from tr11ops.rundir.action_log import INTENT, OUTCOME
from trainer.contract.attempt import EndMarker
from trainer.contract.files import write_json


def job(number: str, state: JobState, start: float | None = None, end: float | None = None) -> Job:
    return Job(number, number, None, None, "run", "me", state, nodes=NODES,
               start_time=None if start is None else BEGIN + start, end_time=None if end is None else BEGIN + end)  # fmt: skip


def ten_steps(tmp_path: Path) -> Past:
    """Job 101 on four nodes has done ten steps, until 130 s, and nothing since."""
    past = Past(tmp_path)
    past.submit(0, "20260921-000000-00000001", 4)
    past.attempt(10, "101", ("n1", "n2", "n3", "n4"))
    past.launch(20)
    past.phase(30, "training", 0)
    past.steps(30, 1, 10, 10)
    return past


def seconds(goodput: Goodput) -> dict[str, float]:
    """Node-seconds by bucket, of those that have any."""
    return {
        str(name): amount.node_micros / 1e6
        for name, amount in goodput.buckets.items()
        if amount.node_micros
    }


@pytest.fixture(autouse=True)
def the_attempts_alone_tell_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of these pasts: how long nodes were held needs no other steps than those read for it."""

    read = read_history

    def read_both(directory, jobs, **more):
        history = read(directory, jobs, **more)
        alone = read_attempts_alone(directory, jobs)
        for now in (BEGIN + 60, BEGIN + 600, BEGIN + 1e6):
            assert held_micros(alone, now) == held_micros(known(history.attempts, ()), now)
        return history

    monkeypatch.setattr(sys.modules[__name__], "read_history", read_both)


TRUTH = {
    "queue": 4 * (600 + 600 + 60),
    "start-up": 4 * 100 + 3 * 88 + 4 * 110 + 4 * 85,
    "load": 4 * 20 + 3 * 20 + 4 * 20 + 4 * 20,
    "useful": 4 * 1000 + 3 * 500 + 4 * 300,
    "redone": 4 * (200 + 100) + 4 * (300 + 80),
    "save": 4 * 80 + 3 * 40 + 4 * 40,
    "evaluation": 4 * 60,
    "hang": 4 * 40 + 3 * 1500,
    "restart gap": 4 * 10 + 3 * 2 + 3 * 10 + 4 * 15,
    "node lost": 4370 - 2210,
    "operator pause": 4 * 3600,
}


def test_an_eventful_past_is_accounted_as_it_was(tmp_path):
    past = Past(tmp_path)
    eventful(past)
    ended = job("103", JobState.NODE_FAIL, 9115, 9600)
    history = read_history(past.directory, (ended,))
    goodput = account(history, BEGIN + 9600)
    assert history.read_errors == ()
    assert seconds(goodput) == pytest.approx(TRUTH, abs=1.0)
    assert goodput.total.node_micros == 1_000_000 * (4 * 9600)
    assert goodput.total.held_micros == 1_000_000 * 4 * (4370 - 600 + 5455 - 4970 + 9600 - 9115)


def test_spares_are_counted_where_the_rest_is(tmp_path):
    past = Past(tmp_path)
    eventful(past)
    goodput = account(read_history(past.directory, ()), BEGIN + 4370)
    spare = {
        str(name): amount.spare_micros / 1e6
        for name, amount in goodput.buckets.items()
        if amount.spare_micros
    }
    assert sum(spare.values()) == 2210 - 600  # one of four, until it took the place of the lost one
    assert spare["useful"] == 1000


def test_each_loss_has_its_cause(tmp_path):
    past = Past(tmp_path)
    eventful(past)
    goodput = account(
        read_history(past.directory, (job("103", JobState.NODE_FAIL, 9115, 9600),)), BEGIN + 9600
    )
    causes = {
        cause: amount.node_micros / 1e6
        for cause, amount in goodput.by(lambda span: span.cause).items()
        if cause
    }
    assert causes == pytest.approx(
        {
            "first start": 4 * 600 + 4 * 100 + 80,
            # lost steps, the wait for the first sign, what followed until the training went on, and
            # the node itself at last the steps of the attempt that the scheduler ended with
            # NODE_FAIL
            "node": 4 * 300 + 4 * 40 + 4 * 10 + 3 * 2 + 3 * 88 + 60 + 2160 + 4 * 380,
            "stall": 3 * 1500,
            "exit-duration": 3 * 10 + 4 * 600 + 4 * 110 + 80,
            "kill-switch": 4 * 15 + 4 * 60 + 4 * 85 + 80,
            "operator": 4 * 3600,
        },
        abs=1.0,
    )
    assert [(fault.cause, fault.time - BEGIN, fault.recovered and fault.recovered - BEGIN) for fault in goodput.faults] == [
        ("node", 2200, 2320), ("node", 9600, None),
    ]  # fmt: skip
    assert goodput.seconds_to_recover == 120


def test_the_last_loss_is_known_when_the_attempt_is_over(tmp_path):
    past = Past(tmp_path)
    eventful(past)
    runs = account(
        read_history(past.directory, (job("103", JobState.RUNNING, 9115),)), BEGIN + 9600
    )
    assert seconds(runs)["redone"] == 4 * 300
    assert seconds(runs)["useful"] == TRUTH["useful"] + 4 * 380


def test_from_a_moment_on_the_rest_is_left_out_but_for_losses(tmp_path):
    past = Past(tmp_path)
    eventful(past)
    goodput = account(
        read_history(past.directory, (job("103", JobState.NODE_FAIL, 9115, 9600),)), BEGIN + 9600
    )
    late = goodput.since(BEGIN + 1900)
    assert late.total.node_micros == 1_000_000 * 4 * (9600 - 1900)
    assert late.buckets[Bucket.REDONE].node_micros == 1_000_000 * (4 * 260 + 4 * 380)
    days = [goodput.between(BEGIN + at, BEGIN + at + 1000) for at in range(0, 10_000, 1000)]
    assert sum(day.total.node_micros for day in days) == goodput.total.node_micros


def test_without_a_record_of_phases_what_a_launch_did_is_unknown(tmp_path):
    past = Past(tmp_path, with_phases=False)
    eventful(past)
    goodput = account(
        read_history(past.directory, (job("103", JobState.NODE_FAIL, 9115, 9600),)), BEGIN + 9600
    )
    found = seconds(goodput)
    assert not {"useful", "save", "load", "evaluation"} & set(found)
    for bucket in ("queue", "node lost"):  # the nodes, and the time between attempts, are known
        assert found[bucket] == TRUTH[bucket]
    assert found["unknown"] >= TRUTH["useful"] + TRUTH["save"] + TRUTH["evaluation"]
    assert sum(found.values()) == 4 * 9600


def test_a_step_clock_that_is_wrong_changes_nothing(tmp_path):
    """The last rank logs the steps, the first one the phases; their nodes' clocks need not agree."""
    found = []
    for name, skew in (("right", 0.0), ("wrong", 37.0), ("behind", -900.0)):
        past = Past(tmp_path / name)
        past.submit(0, TAG, 4)
        past.attempt(0, "101", NODES, TAG)
        past.launch(10)
        past.phase(20, "starting", 0)
        past.phase(30, "training", 0)
        past.save(past.steps(30, 1, 5, 100, skew), 540)
        past.phase(540, "training")
        past.steps(540, 6, 7, 100, skew)
        past.failed(800, 810, "node", ["n1"])
        past.verdict(820, "error", 5, "node")
        found.append(seconds(account(read_history(past.directory, ()), BEGIN + 820)))
    assert found[0] == found[1] == found[2]
    assert found[0]["redone"] == 4 * 260


def test_a_clock_that_was_set_back_loses_no_second(tmp_path):
    past = Past(tmp_path)
    past.submit(0, TAG, 4)
    past.attempt(100, "101", NODES, TAG)
    past.launch(110)
    past.phase(120, "starting", 0)
    past.phase(130, "training", 0)
    past.steps(130, 1, 3, 10)
    past.phase(90, "saving")  # set back by more than a minute
    past.phase(95, "training")
    past.steps(95, 4, 5, 10)
    past.ended(200, 210, "exit-duration", 5)
    past.verdict(205, "exit-duration", 5)
    goodput = account(read_history(past.directory, ()), BEGIN + 205)
    assert goodput.total.node_micros == 4 * 205 * 1_000_000
    assert seconds(goodput)["queue"] == 400


def test_an_unseen_end_is_unknown_until_the_next_attempt(tmp_path):
    past = Past(tmp_path)
    past.submit(0, TAG, 4, "1-2%1")
    past.attempt(0, "101", NODES, TAG, limit="01:00:00")
    past.launch(0)
    past.phase(0, "training", 0)
    past.steps(0, 1, 5, 100)
    past.checkpoint(505, 5)
    past.attempt(2000, "102", NODES, TAG)
    past.launch(2000)
    past.phase(2000, "training", 5)
    past.steps(2000, 6, 7, 100)
    running = (job("102", JobState.RUNNING, 2000),)
    goodput = account(read_history(past.directory, running), BEGIN + 2200)
    assert seconds(goodput) == {"useful": 4 * 700, "unknown": 4 * 1500}
    assert goodput.buckets[Bucket.UNKNOWN].held_micros == 4 * 1500 * 1_000_000
    silent = account(
        read_history(past.directory, Unknown("the controller does not answer")), BEGIN + 5000
    )
    assert seconds(silent)["unknown"] == 4 * 1500 + 4 * 2800  # the second one may well be alive
    over = account(read_history(past.directory, ()), BEGIN + 90_000)
    # but not beyond its time limit
    assert seconds(over)["unknown"] == 4 * 1500 + 4 * (72_000 - 200)
    # both tasks have begun: nothing waits
    assert seconds(over)["restart gap"] == 4 * (90_000 - 74_000)


def test_a_lost_batch_host_is_the_cause_that_the_alert_named(tmp_path):
    """Slurm has forgotten the job: only the watchdog saw that it went on without its script, and
    ended it.
    """
    past = ten_steps(tmp_path)
    unseen = account(read_history(past.directory, ()), BEGIN + 1000)
    assert [fault.cause for fault in unseen.faults] == ["no word"]
    past.journal(200, "alert-opened", detector="zombie", severity="CRITICAL", subject="1000_1")
    alone = account(read_history(past.directory, ()), BEGIN + 1000)
    assert [fault.cause for fault in alone.faults] == ["node"]

    number = {"number": "1", "action": "cancel", "subject": "1000_1", "incident": "cancel:101"}
    past.journal(300, INTENT, **number)
    past.journal(301, OUTCOME, **number, result="done")
    goodput = account(read_history(past.directory, ()), BEGIN + 1000)
    held = goodput.by(lambda span: span.bucket)
    assert Bucket.UNKNOWN not in held or held[Bucket.UNKNOWN].node_micros == 0
    causes = goodput.by(lambda span: span.cause)
    assert causes["node"].node_micros >= 4 * (300 - 130) * 1_000_000, (
        "its nodes were held until the watchdog ended it"
    )
    assert [(fault.cause, fault.job_id) for fault in goodput.faults] == [("node", "101")]


def test_a_lost_batch_host_that_became_critical_and_was_repaired_by_hand_is_the_cause(tmp_path):
    """It is told first when the host only does not answer: a warning, which becomes worse."""
    past = ten_steps(tmp_path)
    told = {"detector": "node-lost", "subject": "1000_1"}
    past.journal(150, "alert-opened", **told, severity="WARNING")
    silent = account(read_history(past.directory, ()), BEGIN + 1000)
    assert [fault.cause for fault in silent.faults] == ["no word"], "it may live"
    past.journal(200, "alert-sent", **told, severity="CRITICAL")
    past.journal(300, "repaired", action="cancel", job_id="1000_1", submitted=[])
    goodput = account(read_history(past.directory, ()), BEGIN + 1000)
    assert [fault.cause for fault in goodput.faults] == ["node"]
    assert seconds(goodput).get("unknown", 0) == 0
    causes = goodput.by(lambda span: span.cause)
    assert causes["node"].node_micros >= 4 * (300 - 130) * 1_000_000


def test_a_hang_that_a_person_ended_is_lost_to_the_hang(tmp_path):
    """`kill --now` is the cure, and was said to be the cause."""
    past = ten_steps(tmp_path)
    past.ended(430, 440, "kill-switch", None)
    goodput = account(read_history(past.directory, ()), BEGIN + 440)
    causes = goodput.by(lambda span: span.cause)
    assert causes["stall"].node_micros >= 4 * 250 * 1_000_000
    hang = goodput.by(lambda span: (span.bucket, span.cause))
    assert (Bucket.HANG, "kill-switch") not in hang


def test_a_killed_foreground_training_ends_with_its_last_sign(tmp_path):
    past = Past(tmp_path)
    past.attempt(0, "101", ("here-0", "here-1"), kind="foreground")
    past.launch(0)
    past.phase(0, "training", 0)
    past.steps(0, 1, 5, 10)
    goodput = account(read_history(past.directory, ()), BEGIN + 1000)
    # no checkpoint: all of it was lost
    assert seconds(goodput) == {"redone": 2 * 50, "restart gap": 2 * 950}


def test_a_job_that_the_scheduler_requeued_has_two_lives(tmp_path):
    """It comes back under its number, and its controller writes the records of its first life over."""
    past = Past(tmp_path)
    past.submit(0, TAG, 4)
    past.attempt(10, "101", NODES, TAG)
    past.launch(10)
    past.phase(10, "training", 0)
    past.save(past.steps(10, 1, 5, 10), 65)
    past.phase(65, "training")
    past.steps(65, 6, 8, 10)
    past.attempt(300, "101", NODES, TAG)
    past.launch(300)
    past.phase(310, "loading", 0)
    past.phase(320, "training", 5)
    past.steps(320, 6, 10, 10)
    goodput = account(
        read_history(past.directory, (job("101", JobState.RUNNING, 300),)), BEGIN + 370
    )
    found = seconds(goodput)
    assert (found["useful"], found["redone"], found["save"]) == (4 * 100, 4 * 30, 20)
    assert found["start-up"] + found["load"] == 4 * 20
    assert sum(found.values()) == 4 * 370
    assert [(fault.job_id, fault.cause) for fault in goodput.faults] == [
        ("101 (requeued)", "no word")
    ]


def test_a_first_step_that_compiles_is_start_up(tmp_path):
    """Compiling attention took 13 s of a first step whose like takes 0.4 s: no one stood still."""
    past = Past(tmp_path)
    past.attempt(0, "101", ("n1",))
    past.launch(0)
    past.phase(10, "compiling", 0)
    past.step(24, 1, 14.0)
    past.phase(24, "training", 1)
    past.steps(24, 2, 25, 0.5)
    past.phase(36, "compiling", 25)  # another length: made anew
    past.step(48.5, 26, 12.5)
    past.phase(48.5, "training", 26)
    past.steps(48.5, 27, 29, 0.5)
    past.ended(50, 50, "interval", 29)
    past.verdict(50, "interval", 29)
    goodput = account(read_history(past.directory, ()), BEGIN + 50)
    found = seconds(goodput)
    assert found["start-up"] == 10 + 13.5 + 12 and "hang" not in found
    assert found["useful"] == 29 * 0.5


def test_a_first_step_that_never_ends_is_a_hang(tmp_path):
    past = Past(tmp_path)
    past.attempt(0, "101", ("n1",))
    past.launch(0)
    past.phase(10, "compiling", 0)
    running = account(read_history(past.directory, (job("101", JobState.RUNNING, 0),)), BEGIN + 100)
    assert seconds(running) == {"start-up": 100}
    past.phase(24, "training", 1)
    past.step(24, 1, 0.5)
    past.steps(24, 2, 5, 0.5)
    past.failed(30, 32, "hang")
    past.launch(40, 2)
    past.phase(45, "compiling", 5)
    past.failed(1000, 1001, "hang")
    past.verdict(1001, "error")
    found = seconds(account(read_history(past.directory, ()), BEGIN + 1001))
    assert found["hang"] > 900


def test_two_attempts_at_once_are_paid_and_the_older_is_lost(tmp_path):
    """Slurm took a job that lives on without its dead node for ended, and started the next task on
    other nodes.
    """
    past = Past(tmp_path)
    past.attempt(0, "101", ("n1", "n2"))
    past.launch(0)
    past.phase(0, "training", 0)
    past.steps(0, 1, 10, 10)
    past.ended(100, 100, "superseded", None)
    past.verdict(100, "superseded")
    past.attempt(50, "102", ("n3", "n4"))
    past.launch(50)
    past.phase(50, "training", 3)
    past.steps(50, 4, 8, 10)
    goodput = account(
        read_history(past.directory, (job("102", JobState.RUNNING, 50),)), BEGIN + 100
    )
    # 30 s of the first lead to where the second began; 20 s were trained again, and 50 s beside it.
    assert seconds(goodput) == {"useful": 2 * 30 + 2 * 50, "redone": 2 * 70}
    assert goodput.effective_time_ratio == pytest.approx(0.8)


def test_no_node_is_held_twice(tmp_path):
    """By the clock of its host the older attempt ended after the newer one had begun on the same
    nodes.
    """
    past = Past(tmp_path)
    past.attempt(0, "101", ("n1", "n2"))
    past.launch(0)
    past.verdict(130, "error", cause="node")
    past.attempt(100, "102", ("n2", "n3"))
    past.launch(100)
    goodput = account(
        read_history(past.directory, (job("102", JobState.RUNNING, 100),)), BEGIN + 200
    )
    assert {name: amount.node_micros / 1e6 for name, amount in goodput.by(lambda span: span.job_id).items()} == {
        "101": 200, "102": 200,
    }  # fmt: skip


def test_an_excluded_node_of_the_allocation_is_lost_not_spare(tmp_path):
    past = Past(tmp_path)
    past.journal(50, "node-excluded", node="n4")
    past.attempt(100, "101", NODES)
    past.launch(100, 1, NODES[:3])
    past.phase(100, "training", 0)
    past.steps(100, 1, 4, 10)
    goodput = account(
        read_history(past.directory, (job("101", JobState.RUNNING, 100),)), BEGIN + 140
    )
    assert seconds(goodput) == {"useful": 3 * 40, "node lost": 40}
    assert goodput.buckets[Bucket.USEFUL].spare_micros == 0
    assert goodput.buckets[Bucket.NODE_LOST].wall_micros == 0  # the others' time is counted already


def test_now_may_be_in_the_middle_of_anything(tmp_path):
    past = Past(tmp_path)
    past.attempt(0, "101", NODES)
    past.launch(5)
    past.phase(10, "loading", 0)
    past.phase(20, "training", 0)
    past.save(past.steps(20, 1, 2, 10), 60)
    history = read_history(past.directory, (job("101", JobState.RUNNING, 0),))
    for now, last in ((3, "start-up"), (15, "load"), (25, "useful"), (50, "save")):
        goodput = account(history, BEGIN + now)
        assert goodput.total.node_micros == 4 * now * 1_000_000
        assert str(max(goodput.spans, key=lambda span: span.end).bucket) == last


def test_a_card_that_cannot_work_is_no_fault(tmp_path):
    past = Past(tmp_path)
    past.attempt(0, "101", NODES)
    past.launch(0)
    past.failed(20, 30, "configuration")
    past.verdict(30, "error", cause="configuration", restart=False)
    goodput = account(read_history(past.directory, ()), BEGIN + 30)
    assert goodput.faults == () and goodput.seconds_between_faults is None
    assert seconds(goodput) == {"start-up": 80, "restart gap": 40}


def test_after_the_last_step_the_account_is_closed(tmp_path):
    past = Past(tmp_path)
    past.submit(0, TAG, 4)
    past.attempt(10, "101", NODES, TAG)
    past.launch(10)
    past.phase(10, "training", 0)
    past.steps(10, 1, 2, 10)
    past.phase(30, "ending")
    past.ended(30, 31, "finished", None)
    past.verdict(32, "finished")
    goodput = account(read_history(past.directory, ()), BEGIN + 1_000_000)
    assert (goodput.end, seconds(goodput)) == (
        BEGIN + 32,
        {"queue": 40, "useful": 80, "restart gap": 8},
    )
    past.submit(5000, SECOND, 2)  # someone wants more of it
    asleep = read_history(past.directory, Unknown("asleep"))
    assert seconds(account(asleep, BEGIN + 5100))["queue"] == 40 + 2 * 100
    # the scheduler has nothing that waits
    cancelled = seconds(account(read_history(past.directory, ()), BEGIN + 5100))
    assert (cancelled["queue"], cancelled["restart gap"]) == (40, 8 + 2 * 100)


def test_a_roll_back_within_a_launch_is_redone_work(tmp_path):
    past = Past(tmp_path)
    past.attempt(0, "101", NODES)
    past.launch(0)
    past.phase(0, "training", 0)
    past.save(past.steps(0, 1, 5, 10), 60)
    past.phase(60, "training")
    past.steps(60, 6, 8, 10)
    past.phase(90, "loading")
    past.phase(95, "training", 5)
    past.steps(95, 6, 7, 10)
    goodput = account(read_history(past.directory, (job("101", JobState.RUNNING, 0),)), BEGIN + 115)
    assert seconds(goodput) == {"useful": 4 * 70, "save": 40, "redone": 120, "load": 20}
    assert {
        span.cause for span in goodput.spans if span.bucket in {Bucket.REDONE, Bucket.LOAD}
    } == {"roll-back"}


def test_attempts_that_leave_for_a_kill_switch_are_operators(tmp_path):
    past = Past(tmp_path)
    past.submit(0, TAG, 4)
    past.attempt(10, "101", NODES, TAG)
    marker = EndMarker("kill-switch", 0, None, False, "", BEGIN + 12, "n1", "101", 0)
    write_json(past.paths.end_marker("101"), to_builtins(marker))
    past.verdict(12, "kill-switch", restart=False)
    goodput = account(read_history(past.directory, ()), BEGIN + 100)
    assert seconds(goodput) == {"queue": 40, "operator pause": 4 * 90}


def test_what_cannot_be_read_is_unknown_and_said(tmp_path):
    past = Past(tmp_path)
    past.submit(0, TAG, 4)
    history = read_history(past.directory, ())
    blind = replace(history, attempts=Unknown("no right to read"))
    assert seconds(account(blind, BEGIN + 100)) == {"unknown": 400}
    past.attempt(10, "101", NODES, TAG)
    (past.paths.attempt("101") / "attempt.json").write_text("{")
    assert any("attempt 101" in doubt for doubt in read_history(past.directory, ()).read_errors)

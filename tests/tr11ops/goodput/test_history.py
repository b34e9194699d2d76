"""What is read of a run's past: ends, stops, holds, exclusions, checkpoints; and what is unknown."""

from __future__ import annotations

import json
import os

import pytest
from msgspec.structs import replace

from tests.tr11ops.goodput.past import BEGIN, Past
from tr11ops.base.observed import Unknown, known
from tr11ops.cluster.base import Job, JobState
from tr11ops.goodput.history import read_attempts_alone, read_history
from tr11ops.goodput.history_values import Period, micro
from tr11ops.observe.files import read_submissions
from tr11ops.rundir.paths import RunDirectory

NODES = ("n1", "n2")
TAG = "20260921-000000-00000001"
DARK = Unknown("the controller does not answer")


def ended(past: Past) -> Past:
    past.submit(0, TAG, 2)
    past.attempt(10, "101", NODES, TAG)
    past.launch(12)
    past.phase(13, "training", 0)
    past.steps(13, 1, 3, 10)
    return past


def a_job(state: JobState, **facts: object) -> Job:
    return replace(Job("101", "101", "1000", 1, "run", "me", state), **facts)


def test_nothing_is_an_empty_past(tmp_path):
    past = Past(tmp_path)
    history = read_history(past.directory, ())
    assert (history.submissions, history.attempts, history.steps, history.checkpoints) == (
        (),
        (),
        (),
        (),
    )
    assert history.read_errors == () and history.waits is False
    assert not past.paths.root.exists()


@pytest.mark.parametrize(
    ("jobs", "verdict", "end", "runs"),
    [
        ((a_job(JobState.RUNNING, start_time=BEGIN + 9),), False, None, True),
        (
            (a_job(JobState.COMPLETED, end_time=BEGIN + 99),),
            True,
            99,
            False,
        ),  # its nodes were held a little longer
        ((a_job(JobState.NODE_FAIL, end_time=BEGIN + 99),), False, 99, False),
        ((a_job(JobState.FAILED),), False, None, False),
        ((a_job(JobState.UNKNOWN),), False, None, None),
        ((), True, 60, False),
        ((), False, None, False),
        (DARK, True, 60, False),
        (DARK, False, None, None),
    ],
)
def test_the_end_is_the_schedulers_or_the_controllers_word(tmp_path, jobs, verdict, end, runs):
    past = ended(Past(tmp_path))
    if verdict:
        past.verdict(60, "exit-duration", 3)
    (attempt,) = read_history(past.directory, jobs).attempts
    assert (attempt.ended and attempt.ended - BEGIN, attempt.is_running) == (end, runs)


def test_the_last_sign_is_the_newest_of_all_traces(tmp_path):
    past = ended(Past(tmp_path))
    assert read_history(past.directory, DARK).attempts[0].last_sign == BEGIN + 43  # the last step
    log = past.directory.paths.attempt("101") / "workers" / "n1" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("a line")
    os.utime(log, (BEGIN + 70, BEGIN + 70))
    assert read_history(past.directory, DARK).attempts[0].last_sign == BEGIN + 70
    beat = {"time": BEGIN + 75, "job_id": "101", "rank": 3}
    past.paths.heartbeats.mkdir(parents=True)
    past.paths.heartbeat(3).write_text(json.dumps(beat))
    past.paths.heartbeat(4).write_text("{")
    assert read_history(past.directory, DARK).attempts[0].last_sign == BEGIN + 75


def test_nodes_are_held_from_the_schedulers_start_on(tmp_path):
    past = ended(Past(tmp_path))
    (attempt,) = read_history(
        past.directory, (a_job(JobState.RUNNING, start_time=BEGIN + 4, nodes=NODES),)
    ).attempts
    assert attempt.start == BEGIN + 4
    assert (attempt.label, attempt.limit) == ("1000_1", 72_000)


def test_stops_are_read_from_the_journal_and_the_files(tmp_path):
    past = ended(Past(tmp_path))
    past.journal(100, "kill-switch-set", request=1)
    past.journal(110, "kill-switch-set", request=2)  # asked again: still the first
    past.journal(200, "kill-switch-released")
    past.journal(300, "pause", request=3)
    past.journal(400, "resumed", switches=["pause"], jobs=[])
    past.journal(500, "kill-switch-set", request=4)  # and removed by hand: no one knows when
    switch = past.directory.kill_switch
    found = read_history(past.directory, ()).pauses
    assert found == (
        Period(BEGIN + 100, BEGIN + 200, "kill switch", "me", "because"),
        Period(BEGIN + 300, BEGIN + 400, "pause", "me", "because"),
    )
    switch.touch()
    assert read_history(past.directory, ()).pauses[-1] == Period(
        BEGIN + 500, None, "kill switch", "me", "because"
    )
    elsewhere = Past(tmp_path / "other")
    elsewhere.directory.root.mkdir(parents=True)
    elsewhere.directory.kill_switch.touch()
    os.utime(elsewhere.directory.kill_switch, (BEGIN, BEGIN))
    assert read_history(elsewhere.directory, ()).pauses == (Period(BEGIN, None, "kill switch"),)


def test_holds_last_until_someone_lets_go(tmp_path):
    past = ended(Past(tmp_path))
    past.journal(100, "array-held", jobs=["1000"])
    past.journal(200, "resumed", switches=[], jobs=["1000"])
    past.journal(300, "array-held", jobs=["1000"])
    past.journal(400, "submitted", tag=TAG)
    past.journal(500, "array-held", jobs=["1001"])
    spans = [
        (hold.start - BEGIN, hold.end and hold.end - BEGIN)
        for hold in read_history(past.directory, ()).holds
    ]
    assert spans == [(100, 200), (300, 400), (500, None)]


def test_exclusions_are_read_node_by_node(tmp_path):
    past = ended(Past(tmp_path))
    past.journal(100, "node-excluded", node="n1")
    past.journal(150, "node-excluded", node="n2")
    past.journal(200, "node-included", node="n1")
    found = read_history(past.directory, ()).exclusions
    assert [(period.what, period.end and period.end - BEGIN) for period in found] == [
        ("n1", 200),
        ("n2", None),
    ]
    assert found[1].holds_at(micro(BEGIN + 150)) and not found[0].holds_at(micro(BEGIN + 200))


def test_only_complete_checkpoints_count_by_their_manifest(tmp_path):
    past = ended(Past(tmp_path))
    past.checkpoint(50, 3)
    past.paths.checkpoint(4).mkdir()
    huge = past.paths.checkpoint(5)
    huge.mkdir()
    (huge / "manifest.json").write_text(
        '{\n "created": 1790000060.5,\n "files": [' + "{}, " * 100_000
    )
    strange = past.paths.checkpoint(6)
    strange.mkdir()
    (strange / "manifest.json").write_text("no time in it")
    os.utime(strange / "manifest.json", (BEGIN + 70, BEGIN + 70))
    marks = read_history(past.directory, ()).checkpoints
    assert [(mark.step, mark.created - BEGIN) for mark in marks] == [(3, 50), (5, 60.5), (6, 70)]


def test_queued_jobs_is_this_runs_own(tmp_path):
    past = ended(Past(tmp_path))
    mine = Job(
        "1000",
        "1000",
        "1000",
        None,
        "run",
        "me",
        JobState.PENDING,
        comment=past.directory.comment(TAG),
    )
    other = RunDirectory(replace(past.paths, root=tmp_path / "elsewhere"), tmp_path / "switch")
    foreign = replace(mine, raw_id="7", array_id="7", comment=other.comment(TAG))
    assert read_history(past.directory, (mine,)).waits is True
    assert read_history(past.directory, (foreign,)).waits is False
    assert read_history(past.directory, DARK).waits is None


def test_a_number_of_another_scheduler_is_another_job(tmp_path):
    past = ended(Past(tmp_path))
    (own,) = known(read_submissions(past.directory)[0], ())
    queued = Job(own.job_id, own.job_id, own.job_id, None, past.paths.name, "me", JobState.PENDING)
    assert read_history(past.directory, (queued,), scheduler=own.scheduler).waits is True
    assert read_history(past.directory, (queued,), scheduler="another").waits is False


def test_what_cannot_be_read_is_said(tmp_path):
    past = ended(Past(tmp_path))
    past.paths.phases("101").unlink()
    past.paths.phases("101").mkdir()
    past.paths.metrics.unlink()
    past.paths.metrics.mkdir()
    (past.paths.attempt("101") / "verdict.json").write_text("garbage")
    (past.paths.attempt("101") / "launches" / "2.json").write_text(
        '{"launch": 2, "nodes": [], "start": "soon"}'
    )
    past.paths.attempt("102").mkdir()  # a job that left before it wrote anything
    (past.directory.journal).mkdir()
    (past.directory.journal / "x.jsonl").mkdir()
    history = read_history(past.directory, DARK)
    assert isinstance(history.steps, Unknown)
    (attempt,) = history.attempts
    assert isinstance(attempt.verdict, Unknown) and [
        launch.launch for launch in attempt.launches
    ] == [1]
    words = "\n".join(history.read_errors)
    for part in (
        "steps",
        "phases of attempt 1000_1",
        "launch 2 of attempt 1000_1",
        "journal x.jsonl",
        "jobs: the controller",
    ):
        assert part in words, words


@pytest.mark.parametrize("ends", [True, False])
def test_how_long_nodes_were_held_needs_no_reading_of_all_steps(tmp_path, monkeypatch, ends):
    """Where the attempt's end is on record, or the scheduler has it running, or its last step is
    among the newest.
    """
    past = ended(Past(tmp_path))
    jobs = ()
    if ends:
        past.verdict(60, "interval")
    history = read_history(past.directory, jobs)
    monkeypatch.setattr("tr11ops.goodput.history.read_metrics", pytest.fail)
    assert read_attempts_alone(past.directory, jobs) == history.attempts
    running = (a_job(JobState.RUNNING, start_time=BEGIN + 9),)
    [attempt] = read_attempts_alone(past.directory, running)
    assert attempt.is_running

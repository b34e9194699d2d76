"""`tr11 kill`, `pause`, `resume` and `checkpoint-now`: what they say, what they hold, and what they undo."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cli.trainings import END, running, trainer_script
from tests.tr11ops.launch.run_inputs import write_card, write_checkpoint
from tests.waiting import until
from tr11ops.cli import resume
from tr11ops.cli.main import execute
from tr11ops.cluster.base import Job, JobState, SchedulerError
from tr11ops.cluster.local import LocalScheduler
from tr11ops.queue.held_jobs import to_hold
from tr11ops.queue.stop import Acknowledgements, StopView, acknowledgements
from tr11ops.rundir.hold_store import held_by_tr11
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.reserve import RESERVE_FILE, keep_reserve
from trainer.contract import requests
from trainer.contract.end_marker import EndMarker
from trainer.contract.files import write_json
from trainer.contract.heartbeat import Heartbeat, write_heartbeat
from trainer.contract.requests import Request, new_request, pause_of, read_request
from trainer.contract.requests import RequestAnswer as CheckpointAnswer


def tr11(bench: LocalBench, *words: str) -> Answer:
    return bench.tr11(words[0], "--run", str(bench.card), "--scheduler", "local", *words[1:])


def held(bench: LocalBench) -> list[str]:
    return [job.job_id for job in bench.scheduler.jobs() if job.reason == "JobHeldUser"]


def write_beats(bench: LocalBench, job_id: str, answered: int, request: int, ranks: int = 4) -> None:
    for rank in range(ranks):
        given = request if rank < answered else 0
        beat = Heartbeat(rank, f"node-{rank // 2}", 1, "saving", 7, 1.0, job_id, given)
        write_heartbeat(run_directory(bench).paths.heartbeat(rank), beat)


# ----------------------------------------------------------------------------- kill
def test_queued_jobs_are_held_at_once_and_resume_releases_them(bench: LocalBench) -> None:
    directory = run_directory(bench)
    bench.block()
    bench.launch("--array", "1-10")
    foreign = bench.submit("true", 1, "small", directory.comment("20260101-000000-00000000"))
    bench.scheduler.hold(foreign)  # by a person, past tr11
    answer = tr11(bench, "kill", "--yes", "--reason", "new data", "--json")
    assert answer.json["held"] == ["2"] and "10 tasks of 2_[1-10%1]: held at once" in answer.err
    assert set(held(bench)) == {"2_[1-10%1]", foreign}
    assert held_by_tr11(directory) == {"2"}
    shown = tr11(bench, "resume", "--dry-run")
    assert "nothing was changed" in shown.err and directory.kill_switch_is_set() and len(held(bench)) == 2
    assert "job 2, by tr11: will be released" in shown.err
    assert f"job {foreign}, not by tr11: stays held" in shown.err
    done = tr11(bench, "resume", "--yes", "--json")
    assert (done.json["released"], done.json["left_held"]) == (["2"], [foreign])
    assert held(bench) == [foreign] and not directory.kill_switch_is_set()
    assert "next:       2_[1-10%1], as soon as nodes are free" in done.err
    assert tr11(bench, "resume", "--json").json["action"] == "nothing"
    kinds = [entry.kind for entry in read_journal(directory.journal).entries]
    assert kinds[-3:] == ["kill-switch-set", "held", "resumed"]


@pytest.mark.parametrize("stop", ["pause", "kill"])
def test_the_part_of_an_array_that_a_person_holds_stays_held(bench: LocalBench, stop: str) -> None:
    """Twice: what the first resume released is on no record that the second could take the person's part by."""
    bench.block()
    bench.launch("--array", "1-10")
    bench.scheduler.hold("2_5")  # by a person, past tr11
    part = "2_[1-4,6-10]"
    for _ in range(2):
        answer = tr11(bench, stop, "--yes", "--json")
        assert answer.json["held"] == [part] and held_by_tr11(run_directory(bench)) == {part}
        assert held(bench) == ["2_[1-10%1]"]
        shown = tr11(bench, "resume", "--dry-run").err
        assert f"job {part}, by tr11: will be released" in shown and "job 2_5, not by tr11: stays held" in shown
        assert f"next:       {part}, as soon as nodes are free" in shown
        done = tr11(bench, "resume", "--yes", "--json")
        assert (done.code, done.json["released"], done.json["left_held"]) == (0, [part], ["2_5"])
        assert held(bench) == ["2_5"] and held_by_tr11(run_directory(bench)) == frozenset()


def test_a_refusal_is_not_believed_against_the_queue(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm answers for an array's ended tasks with an error, and holds or releases those that wait all the same."""
    bench.block()
    bench.launch("--array", "1-10")
    for name in ("hold", "release"):
        real = getattr(LocalScheduler, name)

        def change_and_refuse(edge: LocalScheduler, job_id: str, real: Callable[..., None] = real) -> None:
            real(edge, job_id)
            raise SchedulerError("Job update not available right now, the DB index is being set, try again in a bit")

        monkeypatch.setattr(LocalScheduler, name, change_and_refuse)
    stopped = tr11(bench, "kill", "--yes", "--json")
    assert (stopped.code, stopped.json["held"], len(held(bench))) == (0, ["2"], 1)
    done = tr11(bench, "resume", "--yes", "--json")
    assert (done.code, done.json["released"], held(bench)) == (0, ["2"], [])
    assert held_by_tr11(run_directory(bench)) == frozenset() and "stays held" not in done.err


def test_what_is_released_on_a_full_disk_comes_off_the_record(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.block()
    bench.launch("--array", "1-3")
    assert tr11(bench, "kill", "--yes").code == 0 and held_by_tr11(run_directory(bench)) == {"2"}
    keep_reserve(run_directory(bench))
    reserve = run_directory(bench).paths.state / RESERVE_FILE

    def write(path: Path, value: Any) -> None:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_json(path, value)

    monkeypatch.setattr("tr11ops.rundir.hold_store.write_json", write)
    done = tr11(bench, "resume", "--yes", "--json")
    assert (done.code, done.json["released"], held(bench)) == (0, ["2"], [])
    assert held_by_tr11(run_directory(bench)) == frozenset()


def test_kill_release_lets_what_was_held_start_again(bench: LocalBench) -> None:
    directory = run_directory(bench)
    bench.block()
    bench.launch("--array", "1-3")
    killed = tr11(bench, "kill", "--yes")
    assert held(bench) == ["2_[1-3%1]"] and f"to let it go on: tr11 resume --run {bench.card}" in killed.err
    done = tr11(bench, "kill", "--release", "--yes", "--json")
    assert (done.code, done.json["action"], done.json["released"], done.json["missing"]) == (0, "released", ["2"], None)
    assert held(bench) == [] and not directory.kill_switch_is_set() and held_by_tr11(directory) == frozenset()
    assert "next:       2_[1-3%1], as soon as nodes are free" in done.err


def test_a_finished_training_is_not_said_to_go_on(bench: LocalBench) -> None:
    end = run_directory(bench).paths.attempts / "1" / "end.json"
    end.parent.mkdir(parents=True)
    end.write_text(json.dumps({**END, "reason": "finished", "job_id": "1"}))
    said = tr11(bench, "kill", "--yes").err
    assert "the training is finished" in said and "nothing is left to train" in said
    assert "to let it go on" not in said


def test_pause_too_is_released_by_either_command(bench: LocalBench) -> None:
    bench.block()
    bench.launch("--array", "1-3")
    assert f"to let it go on: tr11 resume --run {bench.card}" in tr11(bench, "pause", "--yes").err
    assert tr11(bench, "kill", "--release", "--yes").code == 0
    assert held(bench) == [] and not run_directory(bench).paths.pause.exists()


@pytest.mark.parametrize("words", [("resume", "--yes"), ("kill", "--release", "--yes")])
def test_what_only_another_may_release_is_no_success(bench: LocalBench, words: tuple[str, ...]) -> None:
    directory = run_directory(bench)
    bench.block()
    foreign = bench.submit("true", 1, "small", directory.comment("20260101-000000-00000000"))
    bench.scheduler.hold(foreign)
    write_json(directory.kill_switch, {})
    done = tr11(bench, *words)
    assert done.code == 1 and f"nothing starts: job {foreign} stays held" in done.err
    assert not directory.kill_switch_is_set()
    assert tr11(bench, *words).code == 1  # and as long as that is so


def test_a_silent_scheduler_leaves_what_is_held_and_says_so(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(self: object, name: str | None = None) -> tuple[Job, ...]:
        raise SchedulerError("no answer")

    bench.block()
    bench.launch("--array", "1-3")
    tr11(bench, "kill", "--yes")
    with monkeypatch.context() as patched:
        patched.setattr("tr11ops.cluster.local.LocalScheduler.jobs", silent)
        done = tr11(bench, "kill", "--release", "--yes")
    assert done.code == 3 and "job 2 may still be held: type this again" in done.err
    assert tr11(bench, "kill", "--release", "--yes").code == 0 and held(bench) == []


def test_a_switch_from_before_the_first_launch_can_be_released(bench: LocalBench) -> None:
    switch = bench.folder / "stop-all"
    switch.touch()
    option = ("--set", f"run.kill_switch={switch}")
    assert tr11(bench, "resume", "--yes", *option).code == 0 and not switch.exists()
    assert not run_directory(bench).root.exists()


def test_a_dry_run_of_an_end_at_once_says_what_would_be_lost(bench: LocalBench) -> None:
    directory = run_directory(bench)
    write_checkpoint(directory.paths.checkpoints, 40)
    directory.paths.logs.mkdir(parents=True)
    step = {
        "iteration": 52, "total_iterations": 100, "consumed_samples": 1, "consumed_tokens": 1, "lm_loss": 2.0,
        "seconds_per_iteration": 105.0, "learning_rate": 0.1, "global_batch_size": 1, "grad_norm": 1.0,
        "samples_per_second": 1.0, "tflops": 1.0, "time": 1.0,
    }  # fmt: skip
    directory.paths.metrics.write_text(json.dumps(step) + "\n")
    answer = tr11(bench, "kill", "--now", "--dry-run", "--json")
    assert "lost:       12 iterations since global_step40, about 21 min of training" in answer.err
    assert answer.json["iterations_at_risk"] == 12 and not directory.kill_switch_is_set()
    assert tr11(bench, "kill", "--yes", "--json").json["kind"] == "kill"
    second = tr11(bench, "kill", "--now", "--yes", "--json")  # and a switch that is set can be sharpened
    assert (second.json["action"], second.json["kind"]) == ("set", "kill-now")
    held_now = read_request(directory.kill_switch, "kill")
    assert held_now is not None and held_now.kind == "kill-now"


def test_receipts_name_the_ranks_that_are_missing(bench: LocalBench) -> None:
    number = running(bench, "exec sleep 600")
    directory = run_directory(bench)
    request = new_request("kill", "ana", "", directory.root)
    write_json(directory.kill_switch, asdict(request))
    write_beats(bench, number, 2, request.id)
    answer = tr11(bench, "kill", "--wait", "--timeout", "0", "--json")
    assert answer.json["receipts"]["missing"] == [{"rank": 2, "host": "node-1"}, {"rank": 3, "host": "node-1"}]
    assert "2 of 4 ranks have answered; missing: rank 2 on node-1, rank 3 on node-1" in answer.err
    assert str(acknowledgements(directory, request.id, ["another"])) == ""
    many = Acknowledgements((), tuple((rank, "n") for rank in range(384)))
    assert str(many) == "none of 384 ranks has answered yet"
    some = Acknowledgements(((384, "n"),), many.missing)
    assert str(some) == "1 of 385 ranks have answered; missing: rank 0 on n, rank 1 on n, rank 2 on n and 381 more"


def test_what_does_not_stop_in_time_is_cancelled_by_who_may(bench: LocalBench) -> None:
    number = running(bench, "exec sleep 600")
    answer = tr11(bench, "kill", "--yes", "--wait", "--set", "resilience.stop_within_minutes=0.0001")
    assert f"job {number} has not stopped within 0.0001 min: cancelling it" in answer.err
    assert answer.code == 1 and f"job {number} ended without a word of the trainer" in answer.out
    assert "stop-fallback" in [entry.kind for entry in read_journal(run_directory(bench).journal).entries]


def test_who_may_not_cancel_is_told_whom_to_call(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    number = running(bench, "exec sleep 600")
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    monkeypatch.setattr("tr11ops.cli.stopping.user_name", lambda: "oncall")
    words = ("kill", "--yes", "--wait", "--timeout", "3", "--set", "resilience.stop_within_minutes=0.0001")
    answer = tr11(bench, *words)
    owner = bench.scheduler.jobs()[0].user
    assert answer.code == 1 and f"call {owner}, who owns it" in answer.err
    assert any(job.raw_id == number and job.state.is_active for job in bench.scheduler.jobs())


def test_another_persons_queue_is_left_to_the_runs_controller(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.block()
    bench.launch("--array", "1-3")
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    monkeypatch.setattr("tr11ops.cli.stopping.user_name", lambda: "oncall")
    answer = tr11(bench, "kill", "--yes", "--json")
    assert answer.json["held"] == [] and held(bench) == []
    assert "the run's own controller holds it" in answer.err and run_directory(bench).kill_switch_is_set()


def test_a_scheduler_that_refuses_a_hold_stops_no_kill(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, job_id: str) -> None:
        raise SchedulerError("Access/permission denied")

    bench.block()
    bench.launch("--array", "1-3")
    monkeypatch.setattr("tr11ops.cluster.local.LocalScheduler.hold", refuse)
    answer = tr11(bench, "kill", "--yes", "--json")
    assert answer.code == 0 and run_directory(bench).kill_switch_is_set()
    assert "not held: job 2 (Access/permission denied)" in answer.err


def test_kill_waits_for_the_end_and_no_task_starts(bench: LocalBench) -> None:
    number = running(bench, f"{trainer_script(bench, END)}")
    bench.launch("--array", "1-3", "--after", number)
    answer = tr11(bench, "kill", "--yes", "--wait", "--json")
    assert answer.code == 0 and answer.json["ended"][0]["reason"] == "kill-switch"
    time.sleep(2)
    assert [job.state for job in bench.scheduler.jobs() if job.array_id] == [JobState.PENDING]


# ----------------------------------------------------------------------------- pause
def test_pause_exempts_the_attempt_that_trains(bench: LocalBench) -> None:
    directory = run_directory(bench)
    number = running(bench, "exec sleep 600")
    bench.launch("--array", "1-3", "--after", number)
    assert "will train to its limit" in tr11(bench, "pause", "--dry-run").err
    assert not directory.paths.pause.exists()
    answer = tr11(bench, "pause", "--yes", "--reason", "maintenance", "--json")
    assert (answer.json["action"], answer.json["trains_on"]) == ("paused", number)
    assert len(answer.json["held"]) == 1 and len(held(bench)) == 1
    assert pause_of(directory.paths, number) is None
    stopped = pause_of(directory.paths, "another")
    assert stopped is not None and stopped.why == "maintenance"
    assert tr11(bench, "pause", "--json").json["action"] == "already-paused"
    done = tr11(bench, "resume", "--yes", "--json")
    assert done.json["switches"] == ["pause"] and held(bench) == []
    assert f"next:       job {number} trains on; then" in done.err


# ----------------------------------------------------------------------------- checkpoint-now
def test_checkpoint_now_waits_for_the_step(bench: LocalBench) -> None:
    directory = run_directory(bench)
    asked = directory.paths.checkpoint_request
    number = running(bench, f"while [ ! -e {asked} ]; do sleep 0.05; done; exec sleep 600")
    assert not asked.exists() and tr11(bench, "checkpoint-now", "--dry-run").code == 0 and not asked.exists()
    late = tr11(bench, "checkpoint-now", "--yes", "--wait", "--timeout", "0", "--json")
    assert late.code == 1 and "no checkpoint came in time" in late.err
    request = read_request(asked, "checkpoint")
    assert request is not None and request.id > 0
    write_beats(bench, number, 4, request.id)
    answer = CheckpointAnswer(request.id, 77, "", 1.0, number)
    directory.paths.answer(request.id).write_text(json.dumps(asdict(answer)))
    found = tr11(bench, "checkpoint-now", "--wait", "--json")  # asked for already: no one is asked again
    assert (found.code, found.json) == (0, {"schema": 1, "request": request.id, "answered": True, "checkpoint": 77})
    directory.paths.answer(request.id).write_text(json.dumps(asdict(replace(answer, step=None, message="disk full"))))
    failed = tr11(bench, "checkpoint-now", "--wait")
    assert failed.code == 1 and "disk full" in failed.err


def test_nothing_is_asked_of_a_run_that_does_not_train(bench: LocalBench) -> None:
    run_directory(bench).root.mkdir()
    answer = tr11(bench, "checkpoint-now", "--yes")
    assert answer.code == 1 and "nothing of this run is training" in answer.err


# ----------------------------------------------------------------------------- profile
def test_a_profile_names_its_file_or_says_why_there_is_none(bench: LocalBench) -> None:
    directory = run_directory(bench)
    asked = directory.paths.profile_request
    running(bench, f"while [ ! -e {asked} ]; do sleep 0.05; done; exec sleep 600")
    shown = tr11(bench, "profile", "--dry-run")
    assert shown.code == 0 and "3 steps of rank 0" in shown.err and not asked.exists()
    assert "1 step of rank 0" in tr11(bench, "profile", "--dry-run", "--steps", "1").err
    late = tr11(bench, "profile", "--yes", "--steps", "2", "--rank", "1", "--timeout", "0")
    assert late.code == 1 and "no profile came in time" in late.err
    assert "waiting until 2 steps are done, 0 s at most" in late.err
    request = read_request(asked, "profile")
    assert request is not None and (request.kind, request.steps, request.rank) == ("profile", 2, 1)
    (entry,) = [entry for entry in read_journal(directory.journal).entries if entry.kind == "profile"]
    assert entry.data == {"request": request.id, "steps": 2, "rank": 1}


def test_operations_of_all_ranks_that_answer(bench: LocalBench) -> None:
    """The request is taken back, so that a rank that starts later does not write."""
    directory = run_directory(bench)
    number = running(bench, "exec sleep 600")
    write_beats(bench, number, 0, 0, ranks=2)
    none = tr11(bench, "profile", "--operations", "--yes", "--timeout", "0")
    assert none.code == 1 and "no rank wrote its operations" in none.err
    assert not directory.paths.operations_request.exists()


# ----------------------------------------------------------------------------- compute-check
def test_a_check_of_the_arithmetic_shows_its_answer(bench: LocalBench) -> None:
    directory = run_directory(bench)
    asked = directory.paths.check_request
    refused = tr11(bench, "compute-check", "--yes")
    assert refused.code == 1 and not asked.exists()
    number = running(bench, "exec sleep 600")
    shown = tr11(bench, "compute-check", "--dry-run")
    assert shown.code == 0 and "computed twice" in shown.err and not asked.exists()
    late = tr11(bench, "compute-check", "--yes", "--timeout", "0", "--reason", "odd loss")
    assert late.code == 1 and "no answer came in time" in late.err
    request = read_request(asked, "compute-check")
    assert request is not None and (request.kind, request.why) == ("compute-check", "odd loss")
    (entry,) = [entry for entry in read_journal(directory.journal).entries if entry.kind == "compute-check"]
    assert entry.data == {"request": request.id} and entry.why == "odd loss"
    for step, message, code in ((40, "iteration 40: 8 ranks computed as before", 0), (None, "SILENT CORRUPTION", 1)):
        answer = CheckpointAnswer(request.id, step, message, 1.0, number)
        directory.paths.answer(request.id).write_text(json.dumps(asdict(answer)))
        with patch("tr11ops.cli.compute_check.new_request", return_value=request):
            told = tr11(bench, "compute-check", "--yes")
        assert told.code == code and message in told.out + told.err


# ----------------------------------------------------------------------------- the files
@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("", "kill", 0),
        ("not JSON", "kill", 0),
        ('{"who": "ana", "why": "x", "time": 1.0, "directory": "/r"}', "kill", 0),  # as older versions wrote it
        ('{"kind": "kill-now", "id": 5}', "kill-now", 5),
        ('{"kind": "dance", "id": 4294967296}', "kill", 0),
        ('{"id": "5"}', "kill", 0),
    ],
)
def test_whatever_lies_there_is_a_request(tmp_path: Path, text: str, kind: str, number: int) -> None:
    path = tmp_path / "kill-switch"
    assert read_request(path, "kill") is None
    path.write_text(text)
    found = read_request(path, "kill")
    assert found is not None and (found.kind, found.id) == (kind, number)
    path.unlink()
    path.symlink_to("nowhere")
    assert read_request(path, "kill") == Request("kill")


@pytest.mark.parametrize("number", ["null", '"3"', str(2**40), "true", "-5", "1.0", "[1]"])
def test_a_number_that_is_none_asks_for_nothing(tmp_path: Path, number: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(f'{{"id": 7, "steps": {number}, "rank": {number}}}')
    found = read_request(path, "profile")
    assert found is not None and (found.id, found.steps, found.rank) == (7, 0, -1)
    assert type(found.steps) is int and type(found.rank) is int
    path.write_text(f'{{"id": {number}}}')
    assert getattr(read_request(path, "profile"), "id", None) == requests.BY_HAND


def test_the_thread_outlives_what_it_does_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requests, "WATCH_SECONDS", 0.01)
    seen: list[Request] = []
    path = tmp_path / "kill-switch"

    def fails() -> None:
        if not path.exists():
            new_request("kill-now", "ana", "now", tmp_path).write(path)
        raise RuntimeError("no recorder")

    requests.watch_for_kill_now(path, seen.append, fails)
    until(lambda: seen, "the request", pause=0.01)
    assert [request.why for request in seen] == ["now"]
    assert "RuntimeError: no recorder" in capsys.readouterr().out


def test_an_end_at_once_is_seen_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "WATCH_SECONDS", 0.01)
    seen: list[Request] = []
    path = tmp_path / "kill-switch"
    new_request("kill", "ana", "", tmp_path).write(path)
    requests.watch_for_kill_now(path, seen.append)
    time.sleep(0.2)
    assert not seen
    new_request("kill-now", "ana", "now", tmp_path).write(path)
    until(lambda: seen, "the request", pause=0.01)
    assert [request.why for request in seen] == ["now"]


def test_only_what_is_mine_and_not_held_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4711)

    def job(number: str, user: str, reason: str = "Priority") -> Job:
        return Job(number, number, None, None, "run", user, JobState.PENDING, reason)

    queued = [job("1", "ana"), job("2", "ben"), job("3", "ana", "JobHeldUser"), job("4", "ben", "JobHeldUser")]
    mine, others = to_hold(queued, "ana")
    assert mine == ("1",) and [one.job_id for one in others] == ["2"]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "1, as soon as nodes are free"),
        ("PartitionDown", "1 waits for the site (PartitionDown: the site has closed its partition)"),
        (
            "QOSGrpWallLimit",
            "1 waits for a person (QOSGrpWallLimit: the granted time is used up, or less is left than it asks for)",
        ),
        (
            "QOSGrpNodeLimit",
            "1 waits (QOSGrpNodeLimit: other jobs use all that its account, QoS or user may have at one time)",
        ),
    ],
)
def test_what_comes_next_is_not_promised_where_it_is_blocked(reason: str, words: str) -> None:
    job = Job("1", "1", None, None, "run", "ana", JobState.PENDING, reason)
    view = StopView((), 1, (job,), (), None, None, "")
    assert resume._next(None, view, resume.Undoing((), (), (), ())) == words  # type: ignore[arg-type]


def test_markers_of_the_new_ends_are_read(tmp_path: Path) -> None:
    for reason in ("pause", "superseded"):
        (tmp_path / "end.json").write_text(json.dumps({**END, "reason": reason, "job_id": "1"}))
        found = EndMarker.read(tmp_path / "end.json")
        assert found is not None and found.reason == reason


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_another_user_of_the_group_stops_the_run_by_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is root's; `nobody`, in its group, sets the switch, and root takes it away again."""
    somebody, group = 65534, 65534
    with tempfile.TemporaryDirectory(prefix="stop-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        card = write_card(folder)
        card.chmod(0o644)
        for place in (folder / "run", folder / "run" / "state"):
            place.mkdir()
            os.chown(place, 0, group)
            place.chmod(0o2775)
        monkeypatch.chdir(folder)
        words = ["--run", str(card), "--scheduler", "slurm"]  # which this user cannot reach
        child = os.fork()
        if child == 0:
            try:
                os.environ["PATH"] = "/nonexistent"
                execute(["kill", *words, "--dry-run"])  # imports what the user could not read
                execute(["resume", *words, "--dry-run"])
                os.setgroups([group])
                os.setresgid(group, group, group)
                os.setresuid(somebody, somebody, somebody)
                os._exit(execute(["kill", *words, "--yes", "--reason", "from the on-call phone"]))
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        switch = folder / "run" / "kill-switch"
        assert switch.stat().st_uid == somebody and switch.stat().st_mode & 0o060 == 0o060
        request = read_request(switch, "kill")
        assert request is not None and request.id and request.why == "from the on-call phone"
        assert execute(["kill", *words, "--release", "--yes"]) == 0
        assert not switch.exists()

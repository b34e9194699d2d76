"""`tr11 pause`, `checkpoint-now`, `profile`, `compute-check`: what is asked of a run, and the files
of it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cli.trainings import END, running
from tests.tr11ops.cli.typed_commands import held, tr11, write_beats
from tests.tr11ops.launch.run_inputs import write_card, write_checkpoint
from tests.tr11ops.status_cases import record
from tests.waiting import until
from tr11ops.cli import resume
from tr11ops.cli.main import execute
from tr11ops.cluster.base import Job, JobState
from tr11ops.queue.held_jobs import to_hold
from tr11ops.queue.stop import StopView
from tr11ops.rundir.journal import read_journal
from trainer.contract import requests
from trainer.contract.attempt import EndMarker
from trainer.contract.metrics_record import format_step
from trainer.contract.requests import (
    Request,
    RequestAnswer as CheckpointAnswer,
    new_request,
    pause_of,
    read_request,
)


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
def test_checkpoint_now_of_a_job_that_is_over_asks_no_other(bench: LocalBench) -> None:
    """A mail about a job is read when the next one trains."""
    asked = run_directory(bench).paths.checkpoint_request
    number = running(bench, "exec sleep 600")
    answer = tr11(bench, "checkpoint-now", "--job", "999_7", "--yes")
    assert answer.code == 1 and not asked.exists()
    assert f"job 999_7 trains no more, and {number} was not asked" in answer.err
    assert tr11(bench, "checkpoint-now", "--job", number, "--yes").code == 0 and asked.exists()


def test_checkpoint_now_waits_for_the_step(bench: LocalBench) -> None:
    directory = run_directory(bench)
    asked = directory.paths.checkpoint_request
    number = running(bench, f"while [ ! -e {asked} ]; do sleep 0.05; done; exec sleep 600")
    assert (
        not asked.exists()
        and tr11(bench, "checkpoint-now", "--dry-run").code == 0
        and not asked.exists()
    )
    late = tr11(bench, "checkpoint-now", "--yes", "--wait", "--timeout", "0", "--json")
    assert late.code == 1 and "no checkpoint came in time" in late.err
    request = read_request(asked, "checkpoint")
    assert request is not None and request.id > 0
    write_beats(bench, number, 4, request.id)
    answer = CheckpointAnswer(request.id, 77, "", 1.0, number)
    directory.paths.answer(request.id).write_text(json.dumps(to_builtins(answer)))
    # asked for already: no one is asked again
    found = tr11(bench, "checkpoint-now", "--wait", "--json")
    assert (found.code, found.json) == (
        0,
        {"schema": 1, "request": request.id, "answered": True, "checkpoint": 77},
    )
    directory.paths.answer(request.id).write_text(
        json.dumps(to_builtins(replace(answer, step=None, message="disk full")))
    )
    failed = tr11(bench, "checkpoint-now", "--wait")
    assert failed.code == 1 and "disk full" in failed.err
    assert "saved" not in failed.out + failed.err


def test_nothing_is_asked_of_a_run_that_does_not_train(bench: LocalBench) -> None:
    run_directory(bench).root.mkdir()
    answer = tr11(bench, "checkpoint-now", "--yes")
    assert answer.code == 1 and "nothing of this run is training" in answer.err


@pytest.mark.parametrize(
    ("last", "saved", "said"),
    [
        (2, None, "no checkpoint has any of its 2 steps"),
        (5, 4, "its newest checkpoint is step 4, and its last step was 5"),
        (5, 5, "all that it trained is saved, in step 5"),
    ],
)
def test_who_asks_too_late_hears_what_is_saved(
    bench: LocalBench, last: int, saved: int | None, said: str
) -> None:
    """An attempt that hears of its end saves and leaves by itself, maybe a moment before someone
    asks it to save.
    """
    paths = run_directory(bench).paths
    paths.main_log.parent.mkdir(parents=True)
    paths.main_log.write_text(f"{format_step(record(last))}\n")
    if saved is not None:
        write_checkpoint(paths.checkpoints, saved)
    answer = tr11(bench, "checkpoint-now", "--yes")
    told = f"so nothing can be saved; {said}; look with `tr11 status"
    assert (answer.code, answer.out) == (1, "") and told in answer.err, answer.err


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
    (entry,) = [
        entry for entry in read_journal(directory.journal).entries if entry.kind == "profile"
    ]
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
    (entry,) = [
        entry for entry in read_journal(directory.journal).entries if entry.kind == "compute-check"
    ]
    assert entry.data == {"request": request.id} and entry.why == "odd loss"
    for step, message, code in (
        (40, "iteration 40: 8 ranks computed as before", 0),
        (None, "SILENT CORRUPTION", 1),
    ):
        answer = CheckpointAnswer(request.id, step, message, 1.0, number)
        directory.paths.answer(request.id).write_text(json.dumps(to_builtins(answer)))
        with patch("tr11ops.cli.requests.new_request", return_value=request):
            told = tr11(bench, "compute-check", "--yes")
        assert told.code == code and message in told.out + told.err


# ----------------------------------------------------------------------------- the files
@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("", "kill", 0),
        ("not JSON", "kill", 0),
        (
            '{"who": "ana", "why": "x", "time": 1.0, "directory": "/r"}',
            "kill",
            0,
        ),  # as older versions wrote it
        ('{"kind": "kill-now", "id": 5}', "kill-now", 5),
        ('{"kind": "dance", "id": 4294967296}', "kill", 0),
        ('{"id": "5"}', "kill", 0),
    ],
)
def test_whatever_lies_there_is_a_request(
    tmp_path: Path, text: str, kind: str, number: int
) -> None:
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


def test_an_end_at_once_is_seen_by_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    queued = [
        job("1", "ana"),
        job("2", "ben"),
        job("3", "ana", "JobHeldUser"),
        job("4", "ben", "JobHeldUser"),
    ]
    mine, others = to_hold(queued, "ana")
    assert mine == ("1",) and [one.job_id for one in others] == ["2"]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "1, as soon as nodes are free"),
        (
            "PartitionDown",
            "1 waits for the site (PartitionDown: the site has closed its partition)",
        ),
        (
            "QOSGrpWallLimit",
            "1 waits for a person (QOSGrpWallLimit: the granted time is used up, or less is left than it asks for)",
        ),
        (
            "QOSGrpNodeLimit",
            "1 waits (QOSGrpNodeLimit: its account, QoS or user may not have so much at one time: others use it, or it alone asks for more)",
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
def test_another_user_of_the_group_stops_the_run_by_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

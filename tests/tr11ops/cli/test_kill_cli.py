"""`tr11 kill`: sets and releases the switch, says what it stops, waits for the end, and never stops
another run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cli.trainings import END, running, trainer_script
from tr11ops.rundir.journal import read_journal
from trainer.contract.files import write_json
from trainer.contract.state_file import read_json


def test_set_twice_and_release_twice(bench: LocalBench) -> None:
    directory = run_directory(bench)
    directory.root.mkdir()
    first = bench.kill("--yes", "--reason", "new data", "--json")
    assert (first.code, first.json["action"], first.json["schema"]) == (0, "set", 1)
    assert "nothing of this run is running or queued" in first.err
    held = read_json(directory.kill_switch)
    assert held is not None and held["why"] == "new data" and {"who", "host", "time"} <= set(held)
    second = bench.kill("--json")  # it changes nothing, so it does not ask
    assert (second.code, second.json["action"]) == (0, "already-set") and "(new data)" in second.err
    assert read_json(directory.kill_switch) == held
    assert bench.launch().code == 1
    released = bench.kill("--release", "--yes", "--json")
    assert released.json["action"] == "released"
    assert released.err.endswith(
        f"nothing is queued: start it with `tr11 launch --run {bench.card} --array 1-10`\n"
    )
    assert not directory.kill_switch_is_set()
    again = bench.kill("--release", "--json")
    assert (again.code, again.json["action"]) == (0, "not-set")
    kinds = [entry.kind for entry in read_journal(directory.journal).entries]
    assert kinds == ["kill-switch-set", "resumed"]


def test_without_a_terminal_it_needs_yes_and_changes_nothing(bench: LocalBench) -> None:
    directory = run_directory(bench)
    directory.root.mkdir()
    answer = bench.kill()
    assert answer.code == 2 and "add --yes" in answer.err and not directory.kill_switch_is_set()
    write_json(directory.kill_switch, {})
    assert bench.kill("--release").code == 2 and directory.kill_switch_is_set()


def test_a_run_that_was_never_launched_is_not_killed(bench: LocalBench) -> None:
    answer = bench.kill("--yes")
    assert answer.code == 1 and "nothing was launched from this card here" in answer.err
    assert not (bench.folder / "run").exists()


def test_another_runs_switch_is_not_touched(bench: LocalBench) -> None:
    (bench.folder / "other" / "state" / "submissions").mkdir(parents=True)
    run_directory(bench).root.mkdir()
    other = bench.folder / "other" / "kill-switch"
    answer = bench.kill("--yes", "--set", f"run.kill_switch={other}")
    assert answer.code == 2 and "belongs to another run" in answer.err and not other.exists()
    other.touch()
    assert (
        bench.kill("--release", "--yes", "--set", f"run.kill_switch={other}").code == 2
        and other.exists()
    )


def test_it_says_what_will_stop(bench: LocalBench) -> None:
    bench.block()
    bench.launch("--array", "1-3")
    # where it was launched, unasked
    answer = bench.tr11("kill", "--run", str(bench.card), "--yes", "--json")
    assert answer.json["queued_tasks"] == 3 and answer.json["running"] == []
    assert "queued:     3 tasks of 2_[1-3%1]" in answer.err


def test_wait_reports_the_checkpoint(bench: LocalBench) -> None:
    number = running(bench, trainer_script(bench, END))
    answer = bench.kill("--yes", "--wait", "--json")
    assert answer.code == 0 and answer.json["running"] == [number]
    assert answer.json["ended"] == [
        {
            "job_id": number,
            "is_over": True,
            "reason": "kill-switch",
            "iteration": 12,
            "checkpoint": 12,
        }
    ]
    assert (
        f"job {number} ended (kill-switch) at iteration 12: checkpoint global_step12" in answer.err
    )


def test_a_trainer_that_cannot_be_asked_is_not_said_to_save(bench: LocalBench) -> None:
    running(bench, trainer_script(bench, END))
    root = run_directory(bench).root
    bench.card.write_text(
        f'[run]\nname = "small"\ndirectory = "{root}"\n[slurm]\nnodes = 1\ngpus_per_node = 1\ntime_limit = "01:00:00"\n'
        '[trainer]\ndialect = "torchtitan"\ncommand = ["train.py"]\n'
    )
    answer = bench.kill("--yes", "--wait")
    assert answer.code == 0, answer.err
    assert "will leave after its next checkpoint" in answer.err
    assert "how:        it cannot be asked to save" in answer.err


@pytest.mark.parametrize("end", [None, {**END, "reason": "error", "checkpoint_step": None}])
def test_an_end_without_the_trainers_word_needs_a_person(
    bench: LocalBench, end: dict[str, object] | None
) -> None:
    number = running(bench, trainer_script(bench, end))
    answer = bench.kill("--yes", "--wait")
    assert answer.code == 1 and f"job {number} ended" in answer.out


def test_waiting_gives_up_and_says_so(bench: LocalBench) -> None:
    number = running(bench, "exec sleep 600")
    write_json(run_directory(bench).paths.heartbeat(0), {
        "rank": 0, "host": "here", "pid": 1, "phase": "saving", "iteration": 7, "time": 1.0, "job_id": number,
    })  # fmt: skip
    answer = bench.kill("--yes", "--wait", "--timeout", "0")
    assert answer.code == 1 and f"job {number} is still there" in answer.out
    assert f"job {number}: saving at iteration 7" in answer.err


def test_a_silent_scheduler_does_not_keep_the_switch_unset(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run_directory(bench)
    directory.root.mkdir()
    monkeypatch.setenv("PATH", "/nonexistent")
    answer = bench.tr11("kill", "--run", str(bench.card), "--scheduler", "slurm", "--yes", "--wait")
    assert directory.kill_switch_is_set()
    assert answer.code == 3 and "the switch works without it" in answer.err


@pytest.mark.parametrize(("typed", "is_set"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_a_person_is_asked(bench: LocalBench, typed: str, is_set: bool) -> None:
    directory = run_directory(bench)
    directory.root.mkdir()
    ours, theirs = os.openpty()
    command = [
        sys.executable,
        "-c",
        "from tr11ops.cli.main import run; run()",
        "kill",
        "--run",
        str(bench.card),
        "--scheduler",
        "local",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    try:
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.write(ours, typed.encode())
        assert process.wait(timeout=300) == (0 if is_set else 1)
    finally:
        os.close(ours)
        os.close(theirs)
    assert directory.kill_switch_is_set() is is_set

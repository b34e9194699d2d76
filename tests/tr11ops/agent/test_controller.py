"""The controller in the foreground, with stand-ins for the node agents: what it starts again,
records, and respects.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.python_server import forking_python
from tests.tr11ops.launch.run_inputs import write_card, write_checkpoint
from tests.waiting import until
from tr11ops.launch.margins import next_interval, read_history
from tr11ops.launch.plan import resolved_card
from tr11ops.runcard.card import load_card
from tr11ops.runcard.exit_duration import exit_plan
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import EXIT_HELD
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths

ROOT = Path(__file__).parents[3]

# What stands in for a node agent: it reads its part from a file, one line for each launch.
AGENT = """
import json, os, sys, time
from pathlib import Path
from msgspec import to_builtins
from trainer.contract.attempt import EndMarker; from trainer.contract.paths import RunPaths; from trainer.contract.files import append_line, write_json
from trainer.contract.requests import new_request
attempt, launch, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["TR11_NODE_RANK"])
parts = (attempt.parents[2] / "parts").read_text().splitlines()
part = parts[min(launch, len(parts)) - 1]
root = attempt.parents[2]
if rank == 0 and "step" in part:
    step = {"kind": "step", "job_id": attempt.name, "iteration": launch, "total_iterations": 9, "consumed_samples": 1,
            "consumed_tokens": 1, "global_batch_size": 1, "learning_rate": 0.1, "seconds_per_iteration": 1.0, "lm_loss": 1.0,
            "samples_per_second": 1.0, "tflops": 1.0}
    append_line(RunPaths(root, "small", "main").metrics, json.dumps(step))
ready = attempt / f"ready-{launch}"  # rank 0 has done what it does before the fault
if rank == 0 and "kill" in part:
    (root / "kill-switch").touch()
if rank == 0 and "now" in part:
    new_request("kill-now", "ana", "a test", root).write(root / "kill-switch")
if rank == 0:
    ready.touch()
while rank == 1 and not ready.exists():
    time.sleep(0.02)
if rank == 1 and "error" in part:
    host = os.environ["TR11_NODE_NAME"]
    write_json(attempt / "failures" / "rank-1.json", {"rank": 1, "host": host, "time": time.time(), "launch": launch,
               "error": part.partition(": ")[2] or "RuntimeError: something"})
    sys.exit(1)
if "error" in part:
    time.sleep(600)
if "whole-but-wrong" in part:  # what begins from step 20 fails at 23, what begins from another step does not
    latest = (RunPaths(root, "small", "main").checkpoints / "latest").read_text().strip()
    (attempt / f"began-{launch}").write_text(latest)
    if latest == "global_step20" or "hopeless" in part:
        if rank == 0:
            step = {"kind": "step", "job_id": attempt.name, "iteration": 23, "total_iterations": 90,
                    "consumed_samples": 1, "consumed_tokens": 1, "global_batch_size": 1, "learning_rate": 0.1,
                    "seconds_per_iteration": 1.0, "lm_loss": 1.0, "samples_per_second": 1.0, "tflops": 1.0,
                    "time": time.time()}
            append_line(RunPaths(root, "small", "main").metrics, json.dumps(step))
            (attempt / f"logged-{launch}").touch()
            time.sleep(600)
        while not (attempt / f"logged-{launch}").exists():
            time.sleep(0.02)
        write_json(attempt / "failures" / "rank-1.json", {"rank": 1, "host": os.environ["TR11_NODE_NAME"],
                   "time": time.time(), "launch": launch, "error": part.partition(": ")[2]})
        sys.exit(1)
if rank == 0 and "refuse" in part:
    marker = EndMarker("refused", 0, None, False, "bad input", time.time(), "h", attempt.name, launch)
    write_json(attempt / "end.json", to_builtins(marker))
    sys.exit(1)
if rank == 0 and "unexplained" in part:
    why = f"it left with status 0 at step {launch} of 90"
    marker = EndMarker("unexplained", launch, None, "for ever" not in part, why, time.time(), "h", attempt.name, launch)
    write_json(attempt / "end.json", to_builtins(marker))
if "unexplained" in part:
    sys.exit(0)
if "die" in part:
    if rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(600)
if "deaf" in part:
    print("waiting", flush=True)
    time.sleep(600)
if "wait" in part:
    print("waiting", flush=True)
    while not (attempt / "stop-request.json").exists():
        time.sleep(0.05)
    reason = "signal"
else:
    reason = "finished"
if rank == 0:
    marker = EndMarker(reason, launch, None, reason == "signal", "the end", time.time(), "h", attempt.name, launch)
    write_json(attempt / "end.json", to_builtins(marker))
"""

SCRIPT = """
import sys
from pathlib import Path
from tr11ops.agent import batch, step
step.WorkerLaunch.node_command = property(
    lambda self: [*{python!r}, "-c", {agent!r}, str(self.attempt), str(self.number)]
)
sys.exit(batch.main(["--card", {card!r}, "--submission", "t", "--foreground-nodes", "2"]))
"""


class Stage:
    """A run directory with a resolved card, and attempts played in it."""

    def __init__(self, folder: Path) -> None:
        write_card(folder, extra="\n[resilience]\nend_within_seconds = 4\n")
        card = load_card(folder / "small.toml", ["run.exit_duration_minutes=5"], {})
        self.paths: RunPaths = card.paths
        self.directory = RunDirectory(card.paths, card.kill_switch)
        self.paths.root.mkdir()
        self.card = folder / "card.json"
        write_json(self.card, resolved_card(card))
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *parts: str, job_id: str = "1") -> subprocess.Popen[str]:
        (self.paths.root / "parts").write_text("\n".join(parts))
        script = SCRIPT.format(python=forking_python(), agent=AGENT, card=str(self.card))
        process = subprocess.Popen(
            [*forking_python(), "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env={**os.environ, "TR11_JOB_ID": job_id},
        )  # fmt: skip
        self.started.append(process)
        return process

    def start_waiting(self, part: str) -> subprocess.Popen[str]:
        """The controller, once its workers say that they wait."""
        process = self.start(part)
        assert process.stdout is not None
        while "waiting" not in process.stdout.readline():
            pass
        return process

    def play(self, *parts: str, job_id: str = "1") -> tuple[int, str]:
        process = self.start(*parts, job_id=job_id)
        shown, _ = process.communicate(timeout=300)
        assert "Traceback" not in shown, shown
        return process.returncode, shown

    def launches(self, job_id: str = "1") -> list[dict[str, Any]]:
        folder = self.paths.attempt(job_id) / "launches"
        return [
            json.loads(path.read_text())
            for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
        ]

    def verdict(self, job_id: str = "1") -> dict[str, Any]:
        value: dict[str, Any] = json.loads(
            (self.paths.attempt(job_id) / "verdict.json").read_text()
        )
        return value


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_killed_node_agent_starts_again_on_the_same_machine(stage: Stage):
    status, shown = stage.play("step die", "step")
    first, second = stage.launches()
    assert (status, stage.verdict()["reason"], stage.verdict()["launches"]) == (0, "finished", 2), (
        shown
    )
    assert (first["cause"], first["nodes"]) == ("node", second["nodes"])
    assert first["start"] < first["first_sign"] <= first["end"] <= second["start"]
    assert (first["iteration_before"], first["iteration_after"], second["iteration_after"]) == (
        None,
        1,
        2,
    )
    assert first["decision"].startswith("starting again")
    assert (first["is_last"], second["is_last"]) == (False, None)
    assert not (stage.paths.state / "exclusions.json").exists()  # it is this very machine
    # What is left of the exit duration is what the second launch gets.
    minutes = json.loads((stage.paths.attempt("1") / "launches" / "2.card").read_text())["run"][
        "exit_duration_minutes"
    ]
    assert 0 < minutes < 5


def test_a_derived_end_follows_what_was_measured_since_launch(stage: Stage):
    overrides = ["run.exit_duration_minutes=none", "slurm.signal_seconds_before_limit=none"]
    card = load_card(stage.card.with_name("small.toml"), overrides, {})
    write_json(stage.card, resolved_card(card, exit_plan(card)))
    stage.paths.logs.mkdir(parents=True)
    stage.paths.main_log.write_text("time (ms) | save-checkpoint: 120000.00\n")
    status, shown = stage.play("step die", "step")
    assert (
        status == 0
        and "tr11: the trainer leaves after 7 min, 3 min before the limit: a save 2 min" in shown
    )
    kept = json.loads((stage.paths.attempt("1") / "card.json").read_text())
    assert kept["run"]["exit_duration_minutes"] == 7 and kept["derived"]["card_hash"] == card.digest
    second = json.loads((stage.paths.attempt("1") / "launches" / "2.card").read_text())
    assert 6 < second["run"]["exit_duration_minutes"] < 7


def test_a_launch_saves_by_what_the_launches_of_its_own_attempt_have_measured(stage: Stage):
    adapts = (
        "resilience.adapt_save_interval=true", "backup.prune=true", "backup.store=archive",
        "checkpoint.interval=100_000", "run.exit_duration_minutes=5",
    )  # fmt: skip
    card = load_card(stage.card.with_name("small.toml"), adapts, {})
    write_json(stage.card, resolved_card(card))
    stage.paths.checkpoints.mkdir(parents=True)
    status, shown = stage.play("step die", "step")
    first, second = (one["save_minutes"] for one in stage.launches())
    assert status == 0 and first is None and 0 < second < 100_000 / 60, shown
    assert "tr11: the training saves as often as its card says: no step, or " in shown
    assert f"tr11: the training saves every {second:g} min: one fault in " in shown
    kept = json.loads((stage.paths.attempt("1") / "launches" / "2.card").read_text())
    assert kept["checkpoint"]["interval_minutes"] == second
    entries = read_journal(RunDirectory(stage.paths, card.kill_switch).journal).entries
    told = [entry for entry in entries if entry.kind == "save-interval"]
    assert [entry.data["minutes"] for entry in told] == [None, second]
    assert told[1].why.startswith(f"the training saves every {second:g} min: one fault in ")
    # what `tr11 launch --dry-run` says is what the next launch does
    foreseen = next_interval(card, stage.paths, read_history(stage.paths))
    assert foreseen is not None and foreseen.minutes is not None


def test_an_unknown_error_is_tried_once_more_and_no_oftener(stage: Stage):
    status, shown = stage.play("error")
    assert status == 1, shown
    assert [launch["cause"] for launch in stage.launches()] == ["unknown", "unknown"]
    verdict = stage.verdict()
    assert (verdict["reason"], verdict["restart"], verdict["progress"]) == ("error", True, False)
    assert "something" in verdict["message"]
    # The second task that the same fault burns says: do not restart.
    status, shown = stage.play("error", job_id="2")
    assert (status, stage.verdict("2")["restart"]) == (EXIT_HELD, False), shown


def test_what_the_job_left_before_it_was_requeued_accuses_no_one(stage: Stage):
    """It keeps its number, and counts its launches anew: a node that it no longer has was condemned
    again, or no one.
    """
    folder = stage.paths.attempt("1")
    ecc = {
        "rank": 0,
        "host": "n9",
        "time": 1.0,
        "launch": 1,
        "error": "RuntimeError: CUDA error: uncorrectable ECC error",
    }
    write_json(folder / "failures" / "rank-0.json", ecc)
    check = {"name": "gpus", "result": "bad", "why": "Xid 79"}
    write_json(
        folder / "nodes" / "n9.json",
        {"node": "n9", "launch": 1, "exit_status": 3, "checks": [check]},
    )
    write_json(folder / "failures" / "rank-7.json", {**ecc, "launch": 5})
    status, shown = stage.play("error", "finish")
    assert status == 0, shown
    first = stage.launches()[0]
    assert (
        "RuntimeError: something" in first["summary"]
        and first["suspects"] != ["n9"]
        and first["blamed"] == []
    )
    assert (
        not (folder / "failures" / "rank-0.json").exists()
        and (folder / "failures" / "rank-7.json").exists()
    )


def test_bad_input_is_not_tried_again(stage: Stage):
    status, _ = stage.play("refuse")
    assert (status, len(stage.launches()), stage.verdict()["cause"]) == (2, 1, "configuration")
    assert stage.verdict()["restart"] is False


def test_an_unexplained_end_is_started_once_more_and_held_where_it_comes_again(stage: Stage):
    """The trainer left with 0, unasked, before its last step: no node is at fault, and progress is
    no excuse.
    """
    status, shown = stage.play("step, unexplained", "finish")
    assert status == 0 and len(stage.launches()) == 2, shown
    first = stage.launches()[0]
    assert (first["cause"], first["blamed"], first["suspects"]) == ("unknown", [], [])
    status, shown = stage.play("step, unexplained", job_id="2")
    verdict = stage.verdict("2")
    assert (status, len(stage.launches("2"))) == (EXIT_HELD, 2), shown
    assert (verdict["reason"], verdict["restart"]) == ("unexplained", False)
    assert verdict["held_because"].startswith("unexplained, and it came again:")
    assert "it left with status 0 at step 2 of 90" in verdict["held_because"]
    status, shown = stage.play("step, unexplained for ever", job_id="3")
    assert (status, len(stage.launches("3"))) == (EXIT_HELD, 1), shown
    assert stage.verdict("3")["held_because"].startswith("unexplained: it left with status 0")


def test_storage_that_comes_back_is_tried_again_and_a_full_one_is_not(stage: Stage):
    """What is started follows from whether a plain restart helps, and the record says so."""
    evicted = "OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/x'"
    status, shown = stage.play(f"error: {evicted}", "finish")
    first, second = stage.launches()
    assert (status, first["cause"], first["restart"]) == (0, "storage", "plain"), shown
    assert (first["decision"], first["nodes"]) == (
        "starting again: storage: once more on the same nodes",
        second["nodes"],
    )
    assert 0 < first["restart_confidence"] < 0.9 and "passes" in first["restart_why"]
    status, shown = stage.play(
        "error: OSError: [Errno 28] No space left on device: '/lustre/x'", job_id="2"
    )
    [only] = stage.launches("2")
    assert (status, only["cause"], only["restart"]) == (EXIT_HELD, "storage", "change"), shown
    assert only["decision"] == "stopping: storage: another launch would end the same way"
    assert only["is_last"] is True


WRONG = "NotFiniteError: the last 5 steps were not finite"
UNKNOWN = "RuntimeError: something"


def with_checkpoints(stage: Stage, *steps: int) -> None:
    stage.paths.logs.mkdir(parents=True)
    for step in steps:
        write_checkpoint(stage.paths.checkpoints, step)


def latest(stage: Stage) -> str:
    return (stage.paths.checkpoints / "latest").read_text().strip()


@pytest.mark.parametrize("error", [WRONG, UNKNOWN])
def test_an_older_checkpoint_is_tried_before_anything_is_held(stage: Stage, error: str):
    """A checkpoint that is whole and wrong: what begins from it ends at one step, again and again."""
    with_checkpoints(stage, 10, 15, 20)
    (
        stage.paths.checkpoints / "global_step15" / "cursor.json"
    ).unlink()  # no training resumes from it
    before = sorted(path.name for path in stage.paths.checkpoints.iterdir())
    status, shown = stage.play(f"whole-but-wrong: {error}")
    assert (status, stage.verdict()["reason"]) == (0, "finished"), shown
    first, second, third = stage.launches()
    began = [(stage.paths.attempt("1") / f"began-{number}").read_text() for number in (1, 2, 3)]
    assert began == ["global_step20", "global_step20", "global_step10"]
    assert [one["older_checkpoint"] for one in (first, second, third)] == [None, 10, None]
    assert second["decision"] == "starting again: from the older checkpoint of step 10"
    said = "launches that begin from step 20 end at iteration 23, 2 times so far: the training goes on from the older"
    assert f"tr11: {said} checkpoint of step 10; step 20 stays where it is" in shown
    [entry] = [
        one
        for one in read_journal(stage.directory.journal).entries
        if one.kind == "older-checkpoint"
    ]
    assert (entry.data["doubted"], entry.data["step"]) == (20, 10) and said in entry.why
    # nothing is renamed
    assert sorted(path.name for path in stage.paths.checkpoints.iterdir()) == before
    assert latest(stage) == "global_step10"


def test_what_an_older_checkpoint_does_not_cure_holds_and_goes_back(stage: Stage):
    with_checkpoints(stage, 10, 20)
    status, shown = stage.play(f"whole-but-wrong hopeless: {WRONG}")
    assert (status, len(stage.launches())) == (EXIT_HELD, 3), shown
    assert (
        "the same fault came back at the same step, from an older checkpoint too"
        in stage.verdict()["held_because"]
    )
    assert (
        latest(stage) == "global_step20"
        and "step 10 was no cure: step 20 is resumed from again" in shown
    )


def test_without_an_older_checkpoint_the_same_step_is_tried_twice(stage: Stage):
    with_checkpoints(stage, 20)
    status, shown = stage.play(f"whole-but-wrong: {WRONG}")
    assert (status, len(stage.launches())) == (EXIT_HELD, 2), shown
    assert stage.verdict()["held_because"].startswith(
        "numerics: another launch would end the same way"
    )


def test_repetitions_are_counted_over_attempts(stage: Stage):
    """Each task may have time for one launch only."""
    with_checkpoints(stage, 10, 20)
    card = json.loads(stage.card.read_text())
    write_json(
        stage.card, {**card, "resilience": {**card["resilience"], "launches_per_attempt": 1}}
    )
    assert stage.play(f"whole-but-wrong: {UNKNOWN}")[0] == 1 and latest(stage) == "global_step20"
    status, shown = stage.play(f"whole-but-wrong: {UNKNOWN}", job_id="2")
    # not held: the next task begins from another one
    assert (status, latest(stage)) == (1, "global_step10"), shown
    assert stage.verdict("2")["restart"] is True
    assert stage.play(f"whole-but-wrong: {UNKNOWN}", job_id="3")[0] == 0


def test_a_kill_switch_between_two_launches_is_honoured(stage: Stage):
    status, shown = stage.play("step kill die", "step")
    assert (status, len(stage.launches())) == (0, 1), shown
    assert (stage.verdict()["reason"], stage.verdict()["restart"]) == ("kill-switch", False)
    assert (
        json.loads((stage.paths.attempt("1") / "end.json").read_text())["reason"] == "kill-switch"
    )
    status, _ = stage.play("step", job_id="2")
    assert (status, stage.launches("2"), stage.verdict("2")["reason"]) == (0, [], "kill-switch")


def test_ranks_that_are_lost_in_an_end_at_once_are_no_fault(stage: Stage):
    status, shown = stage.play("step now error")
    [launch] = stage.launches()
    assert (status, launch["cause"], launch["blamed"], launch["suspects"]) == (
        0,
        "operator",
        [],
        [],
    ), shown
    assert (stage.verdict()["reason"], stage.verdict()["restart"]) == ("kill-switch", False)
    assert (
        json.loads((stage.paths.attempt("1") / "end.json").read_text())["reason"] == "kill-switch"
    )
    assert "launch 1 failed" not in shown


def test_a_pause_keeps_all_but_the_named_attempt_from_training(stage: Stage):
    write_json(stage.paths.pause, {"kind": "pause", "id": 5, "exempt": "1"})
    assert (stage.play("step")[0], stage.verdict()["reason"]) == (0, "finished")
    assert (
        stage.play("step", job_id="2")[0],
        stage.verdict("2")["reason"],
        stage.launches("2"),
    ) == (0, "pause", [])


def test_a_signal_saves_and_leaves_and_no_launch_follows(stage: Stage):
    process = stage.start_waiting("wait")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=300)
    assert (process.returncode, stage.verdict()["reason"], stage.verdict()["restart"]) == (
        0,
        "signal",
        True,
    )
    assert len(stage.launches()) == 1


def test_why_a_launch_ends_is_kept_before_its_workers_have_left(stage: Stage):
    """Slurm kills the controller with them, 30 s after it has told all to go."""
    process = stage.start_waiting("deaf")
    process.send_signal(signal.SIGTERM)
    until(lambda: stage.launches()[0]["cause"] == "operator", "the cause of the end")
    [launch] = stage.launches()
    assert (launch["end"], launch["summary"].split(";")[0]) == (None, "SIGTERM to the batch script")
    process.send_signal(signal.SIGINT)  # and now at once
    process.communicate(timeout=300)
    [launch] = stage.launches()
    assert launch["end"] is not None and launch["cause"] == "operator"


def test_a_signal_during_the_teardown_is_not_lost(stage: Stage):
    process = stage.start("step die", "step")
    failures = stage.paths.attempt("1") / "failures"
    until(failures.exists, "the first failure", pause=0.01)
    process.send_signal(signal.SIGUSR1)
    shown, _ = process.communicate(timeout=300)
    launches = stage.launches()
    # It came before the second launch, which must not start, or during it, which is asked to leave.
    assert len(launches) == 1 or "asking the trainer to save" in shown, textwrap.indent(shown, "> ")
    if len(launches) == 1:
        assert (process.returncode, stage.verdict()["restart"]) == (1, True)
        assert "SIGUSR1 received" in stage.verdict()["message"]


def test_an_attempt_that_should_have_been_held_does_not_train(stage: Stage):
    folder = stage.paths.attempt("1")
    stage.play("refuse")
    verdict = stage.verdict()
    write_json(folder / "verdict.json", {**verdict, "hold_failed": True})
    record = json.loads((folder / "attempt.json").read_text())
    write_json(folder / "attempt.json", {**record, "array_id": "7", "task_id": 1})
    status, shown = stage.play("step", job_id="2")
    assert (status, stage.launches("2")) == (EXIT_HELD, []), shown
    assert "attempt 7_1 ended so that nothing may start" in stage.verdict("2")["message"]
    assert stage.play("step", job_id="3")[0] == 0  # that one has been said


def test_an_attempt_does_not_begin_anew_where_checkpoints_were_lost(stage: Stage):
    attempt = stage.paths.attempt("1")
    write_json(attempt / "card.json", {"run": {"variant": stage.paths.variant}})
    write_json(attempt / "launches" / "1.json", {"checkpoint_before": 0, "checkpoint_after": 20})
    status, shown = stage.play("step", job_id="2")
    assert (status, stage.launches("2")) == (EXIT_HELD, []), shown
    verdict = stage.verdict("2")
    assert "holds no checkpoint, but global_step20 was saved" in verdict["held_because"]
    assert verdict["fault"] == "its checkpoints are lost" and not verdict["restart"]

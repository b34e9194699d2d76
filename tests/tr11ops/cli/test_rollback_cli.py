"""`tr11 rollback` as typed: the plan, the refusals while a trainer lives or may live, and what the
queue then does.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cli.trainings import running
from tests.tr11ops.launch.run_inputs import write_checkpoint
from tests.tr11ops.status_cases import record
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.local import LocalScheduler
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_names import checkpoint_steps, read_latest
from trainer.contract.files import write_atomically
from trainer.contract.lease import Lease, LeaseClaim, LeaseFolder
from trainer.contract.metrics_record import format_step
from trainer.contract.recovery import PendingMoves, RecoveryRecord, read_recovery, write_recovery


def saved(bench: LocalBench) -> RunDirectory:
    directory = run_directory(bench)
    directory.root.mkdir()
    for step in (2, 4, 6):
        write_checkpoint(directory.paths.checkpoints, step)
    return directory


def rollback(bench: LocalBench, *words: str) -> Answer:
    return bench.tr11("rollback", "--run", str(bench.card), "--scheduler", "local", *words)


def tree(directory: RunDirectory) -> set[str]:
    """All that is below the run directory, but for the folder in which the clock is asked."""
    return {str(path.relative_to(directory.root)) for path in directory.root.rglob("*")
            if "state" not in path.parts}  # fmt: skip


def test_plan_apply_and_undo(bench: LocalBench) -> None:
    directory = saved(bench)
    before = tree(directory)
    shown = rollback(bench, "4", "--skip", "2", "--dry-run", "--json")
    assert shown.code == 0 and tree(directory) == before
    value = shown.json
    assert (value["schema"], value["action"], value["to_step"], value["latest_before"]) == (
        1,
        "planned",
        4,
        6,
    )
    assert value["moves"] == [{"from": "global_step6", "to": "global_step6.discarded"}]
    assert (
        value["skip"] == {"first": 5, "last": 6, "samples": 16, "tokens": 256}
        and value["queued"] == []
    )
    for line in shown.err.splitlines():
        assert len(line) <= 80
    assert rollback(bench, "4", "--skip", "2").code == 2  # no one can be asked
    assert tree(directory) == before
    done = rollback(bench, "4", "--skip", "2", "--yes", "--reason", "a spike", "--json")
    assert (done.code, done.json["action"]) == (0, "rolled-back")
    assert "verified:   every byte of step 4" in done.err
    assert (
        checkpoint_steps(directory.paths.checkpoints) == [2, 4]
        and read_latest(directory.paths.checkpoints) == 4
    )
    again = rollback(bench, "4", "--json")
    assert (again.code, again.json["action"]) == (0, "nothing")
    back = rollback(bench, "--undo", "--yes", "--json")
    assert (back.code, back.json["action"], back.json["to_step"]) == (0, "undone", 6)
    assert checkpoint_steps(directory.paths.checkpoints) == [2, 4, 6]
    assert rollback(bench, "--undo", "--yes").code == 1


def test_a_skip_without_an_end_goes_as_far_as_the_training_had_come_when_it_is_typed(
    bench: LocalBench,
) -> None:
    directory = saved(bench)
    assert rollback(bench, "4", "--skip", "5-", "--dry-run", "--json").json["skip"]["last"] == 6
    write_checkpoint(directory.paths.checkpoints, 7)
    done = rollback(bench, "4", "--skip", "5-", "--yes", "--json")
    assert (done.code, done.json["skip"]["first"], done.json["skip"]["last"]) == (0, 5, 7)


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (("2", "--skip", "5-6"), "5-8"),
        (("2", "--skip", "7-8"), "5-8"),
        (("2",), "5-8"),
        (("2", "--skip", "5-"), None),
        (("2", "--skip", "3-9"), None),
    ],
)
def test_iterations_that_were_not_finite_and_would_be_trained_again_are_named(
    bench: LocalBench, words: tuple[str, ...], needed: str | None
) -> None:
    """A range that was read in a mail is too short by the time that the run has stopped."""
    directory = saved(bench)
    losses = {3: 4.0, 4: 4.0, 5: math.nan, 6: 3.9, 7: math.nan, 8: math.nan}
    lines = [
        format_step(record(iteration, lm_loss=loss))
        for iteration, loss in ({7: math.nan} | losses).items()
    ]
    directory.paths.main_log.parent.mkdir(parents=True, exist_ok=True)
    directory.paths.main_log.write_text("".join(f"{line}\n" for line in lines))
    shown = rollback(bench, *words, "--dry-run", "--json")
    assert shown.json["skip_needed"] == needed
    assert (f"--skip {needed} skips them all" in shown.err) is (needed is not None)
    assert all(len(line) <= 80 for line in shown.err.splitlines())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("4", "--skip", "7-"), 1, "the last iteration trained is 6"),
        (("4", "--skip", "4-"), 1, "begin at 5"),
        (("4", "--skip", "0-"), 2, "is not a range"),
        ((), 2, "go back to which step?"),
        (("4", "--undo"), 2, "not both"),
        (("--skip", "3"), 2, "--skip needs a STEP"),
        (("4", "--skip", "0"), 2, "is not a range"),
        (("4", "--skip", "9-8"), 2, "ends before it starts"),
        (("4", "--skip", "9"), 1, "beyond the training's end"),
        (("3",), 1, "does not exist; there are 3, the newest 2, 4, 6"),
    ],
)
def test_wrong_words(bench: LocalBench, words: tuple[str, ...], code: int, says: str) -> None:
    saved(bench)
    answer = rollback(bench, *words, "--yes")
    assert answer.code == code and says in answer.err + answer.out


@pytest.mark.parametrize("words", [("4",), ("4", "--dry-run"), ("4", "--skip", "5-", "--yes")])
@pytest.mark.parametrize("lives", [True, False])
def test_before_the_first_save_it_says_that_there_is_nothing_to_go_back_to(
    bench: LocalBench, words: tuple[str, ...], lives: bool
) -> None:
    """Also of a training that runs: no one is asked to stop it for that."""
    directory = run_directory(bench)
    directory.paths.checkpoints.mkdir(parents=True)
    if lives:
        running(bench, "exec sleep 600")
    answer = rollback(bench, *words)
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (1, "", 1)
    assert (
        f"{directory.paths.checkpoints} holds no checkpoint: there is nothing to go" in answer.err
    )
    assert "`tr11 checkpoint-now" in answer.err and "tr11 kill" not in answer.err
    assert answer.err.endswith("Nothing was changed\n") and not list(
        directory.paths.checkpoints.iterdir()
    )


def test_a_training_is_not_to_be_stopped_for_what_cannot_be_done(bench: LocalBench) -> None:
    saved(bench)
    running(bench, "exec sleep 600")
    answer = rollback(bench, "3", "--yes")
    assert answer.code == 1 and "global_step3 does not exist" in answer.err
    assert "stop it first" in rollback(bench, "4", "--yes").err


def test_a_damaged_step_is_found_out_before_anything_is_renamed(bench: LocalBench) -> None:
    directory = saved(bench)
    (directory.paths.checkpoints / "global_step4" / "weights" / "part.bin").write_bytes(
        os.urandom(64)
    )
    answer = rollback(bench, "4", "--yes")
    assert answer.code == 1 and "is damaged" in answer.err + answer.out
    assert checkpoint_steps(directory.paths.checkpoints) == [2, 4, 6]
    assert rollback(bench, "4", "--yes").code == 1  # and it is on record


def test_not_while_a_trainer_lives_or_may_live(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved(bench)
    lease = Lease.begin(directory.paths, "elsewhere-1", 1)
    assert lease.take() is None
    held = rollback(bench, "4", "--yes")
    assert held.code == 1 and "a trainer holds the run's lease" in held.err + held.out
    lease.release()
    number = running(bench, "exec sleep 600")
    alive = rollback(bench, "4", "--yes")
    assert alive.code == 1 and f"job {number}" in alive.err + alive.out
    bench.clear()
    # its trainer is gone with its job, and did not let go
    killed = Lease.begin(directory.paths, number, 1)
    assert killed.take() is None
    assert rollback(bench, "4", "--dry-run").code == 0
    killed.release()

    def silent(scheduler: LocalScheduler) -> Any:
        raise SchedulerError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(LocalScheduler, "jobs", silent)
        unknown = rollback(bench, "4", "--yes")
    assert unknown.code == 3 and "a trainer may be alive" in unknown.err + unknown.out
    epoch = directory.paths.state / "lease" / "9.json"
    epoch.write_text("{")  # a claim that cannot be read, made a moment ago
    assert rollback(bench, "4", "--yes").code == 1
    assert checkpoint_steps(directory.paths.checkpoints) == [2, 4, 6]


def test_a_roll_back_that_was_killed_here_keeps_the_next_from_nothing(bench: LocalBench) -> None:
    """Its claim is young, and its process is gone; one that lives, or lived elsewhere, is waited
    for.
    """
    directory = saved(bench)
    leases = LeaseFolder(directory.paths)
    mine = LeaseClaim.of_this_process("rollback", 0)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert leases.claim(1, replace(mine, epoch=1))
    alive = rollback(bench, "4", "--yes")
    assert alive.code == 1 and "a roll-back holds the run's lease" in alive.err + alive.out
    assert leases.claim(2, replace(mine, epoch=2, host="elsewhere", pid=ended.pid))
    assert rollback(bench, "4", "--yes").code == 1
    assert leases.claim(3, replace(mine, epoch=3, pid=ended.pid))
    assert rollback(bench, "4", "--yes").code == 0
    assert read_latest(directory.paths.checkpoints) == 4


def test_what_is_queued_resumes_there(bench: LocalBench) -> None:
    saved(bench)
    bench.block()
    bench.launch("--array", "1-3")
    answer = rollback(bench, "4", "--yes", "--json")
    assert answer.code == 0 and answer.json["queued"] == ["2_[1-3%1]"]
    assert "queued:     3 tasks of 2_[1-3%1]: resumes from step 4" in answer.err
    assert bench.kill("--yes").code == 0
    held = rollback(bench, "2", "--dry-run")
    assert "held; released, it resumes from step 2" in held.err


def test_one_that_was_cut_off_is_finished_and_said(bench: LocalBench) -> None:
    directory = saved(bench)
    moves = (("global_step6", "global_step6.discarded"),)
    write_recovery(directory.paths, RecoveryRecord((), PendingMoves(moves, "global_step4")))
    write_atomically(directory.paths.checkpoints / "latest", "global_step4")
    listed = bench.tr11("checkpoints", "list", "--run", str(bench.card))
    assert listed.code == 3 and "a roll-back was cut off" in listed.err
    assert rollback(bench, "2", "--dry-run").code == 1
    assert checkpoint_steps(directory.paths.checkpoints) == [2, 4, 6]
    answer = rollback(bench, "--yes", "--json")
    assert (answer.code, answer.json) == (0, {"schema": 1, "action": "finished", "to_step": 4})
    assert checkpoint_steps(directory.paths.checkpoints) == [2, 4]
    assert read_recovery(directory.paths) == RecoveryRecord()


def test_a_damaged_record_is_not_overwritten(bench: LocalBench) -> None:
    directory = saved(bench)
    path: Path = directory.paths.state / "recovery.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '{"schema": 1, "variants": {}, "pending": {"main": {"moves": [["../x", "y"]]}}}'
    )
    answer = rollback(bench, "4", "--yes")
    assert answer.code == 3 and "is damaged" in answer.err + answer.out
    assert checkpoint_steps(directory.paths.checkpoints) == [2, 4, 6]

"""The main job on real Slurm with the real trainer: its time limit and resume, and the stop switches, with
which what is queued never starts, and what trains saves and leaves.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end import Playground
from tr11ops.cluster.arrays import tasks_of
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.twin.twin import Twin
from tr11ops.watchdog.verdict import MOVING
from trainer.contract.checkpoint_names import checkpoint_steps

DATA_WORKER = ["--set", "data.workers=1"]


class Stage:
    """A playground on the twin, and the words that every command needs."""

    def __init__(self, folder: Path, twin: Twin) -> None:
        self.slurm = SlurmScheduler(twin.environment)
        self.place = Playground(folder, {**os.environ, **twin.environment, "COLUMNS": "100"})
        self.place.prepare()
        self.card = self.place.card("tr11.toml", nodes=2, workers=1)
        self.changes = ["--set", "parallel.tensor=1", *DATA_WORKER]

    def tr11(self, command: str, *words: str, expect: int | None = 0) -> dict[str, Any]:
        done = self.place.tr11(
            command, "--run", self.card, *self.changes, *words, "--json", expect=expect
        )
        value: dict[str, Any] = json.loads(done.stdout)
        return value

    def launch(self, array: str) -> str:
        return str(self.tr11("launch", "--array", array, "--scheduler", "slurm")["job_id"])

    def waiting(self) -> list[Job]:
        return [
            job
            for job in self.slurm.jobs()
            if job.name == "small" and job.state is JobState.PENDING
        ]

    def wait_for_hold(self) -> None:
        """Until all that waits is held and Slurm gives that as the reason: of an array's tasks it
        may give another one first, until the task that ran has left its nodes.
        """
        self.place.wait(
            lambda: all(job.reason.startswith("JobHeld") for job in self.waiting()), "the hold"
        )

    def attempts(self) -> int:
        return len(list(self.place.paths().attempts.iterdir()))

    def last_iteration(self) -> int:
        steps = self.place.steps()
        return int(steps[-1]["iteration"]) if steps else 0


@pytest.fixture
def stage(tmp_path: Path, twin: Twin) -> Iterator[Stage]:
    under_test = Stage(tmp_path, twin)
    yield under_test
    for number in {
        job.array_id or job.raw_id for job in under_test.slurm.jobs() if not job.state.is_final
    }:
        under_test.slurm.cancel(number)


def test_ten_queued_tasks_never_start_and_go_on_after_resume(stage: Stage) -> None:
    number = stage.launch("1-11")
    stage.place.wait(lambda: stage.last_iteration() >= 2, "two steps")
    saved = stage.tr11("checkpoint-now", "--yes", "--wait", "--reason", "a test")
    assert saved["answered"] and stage.place.manifest(saved["checkpoint"]) is not None

    stage.slurm.hold(f"{number}_7")  # by a person, past tr11
    killed = stage.tr11("kill", "--yes", "--wait", "--reason", "a test")
    assert killed["held"] == [f"{number}_[2-6,8-11]"] and killed["queued_tasks"] == 10
    assert killed["receipts"]["missing"] == [] and len(killed["receipts"]["given"]) == 2
    (end,) = stage.place.ends()
    assert (
        end.reason == "kill-switch" and end.checkpoint_step == end.iteration > saved["checkpoint"]
    )
    assert {task for job in stage.waiting() for task in tasks_of(job)} == set(range(2, 12))
    stage.wait_for_hold()
    assert stage.attempts() == 1

    resumed = stage.tr11("resume", "--yes")
    assert resumed["released"] == [f"{number}_[2-6,8-11]"] and resumed["left_held"] == [
        f"{number}_7"
    ]
    stage.place.wait(lambda: stage.last_iteration() > end.iteration, "the second task's steps")
    assert [job.job_id for job in stage.waiting() if job.reason.startswith("JobHeld")] == [
        f"{number}_7"
    ]
    paused = stage.tr11("pause", "--yes")
    assert paused["held"] == [f"{number}_[3-6,8-11]"] and paused["trains_on"]
    before = checkpoint_steps(stage.place.paths().checkpoints)
    ended = stage.tr11("kill", "--now", "--yes", "--wait")
    assert ended["ended"][0]["reason"] == "kill-switch"
    # A save that was due anyway may have come first; none was made for the end.
    last = stage.place.ends()[-1]
    after = checkpoint_steps(stage.place.paths().checkpoints)
    assert last.iteration not in set(after) - set(before) or last.iteration % 5 == 0
    assert "without saving" in last.message
    stage.wait_for_hold()
    assert stage.attempts() == 2


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_drill_passes_in_all_five_phases(stage: Stage) -> None:
    value = stage.tr11("drill", "--yes", "--scheduler", "slurm", "--timeout", "1000")
    assert value["fine"] and [phase["phase"] for phase in value["phases"]] == [
        "starting", "training", "evaluating", "saving", "data-wait",
    ]  # fmt: skip
    assert all(phase["sent_in"] == phase["phase"] for phase in value["phases"][1:])
    assert Path(value["proof"]).is_file()
    assert json.loads(Path(value["proof"]).read_text())["fine"]


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("phase", ["starting", "training", "evaluating", "saving", "data-wait"])
@pytest.mark.parametrize("switch", ["kill", "kill-now", "pause", "checkpoint-now"])
def test_each_switch_in_each_phase(stage: Stage, switch: str, phase: str) -> None:
    """The trainer is held in the phase as a drill holds it, until a stop signal or, here, a switch
    is seen.
    """
    stage.changes += [
        "--set", f'slurm.environment.TR11_DRILL="{phase}"', "--set", "checkpoint.interval=3",
        "--set", "evaluation.interval=2", "--set", "run.exit_interval=8",
    ]  # fmt: skip
    stage.launch("1-2")
    beats = stage.place.paths().heartbeat(0)

    def reached() -> bool:
        if not beats.exists():
            return False
        value = json.loads(beats.read_text())
        return bool(value["phase"] == phase and (phase != "training" or value["iteration"] > 0))

    stage.place.wait(reached, phase)
    if switch == "pause":
        assert stage.tr11("pause", "--yes")["held"]
        stage.place.wait(lambda: len(stage.place.ends()) == 1, "the end at the limit")
        assert stage.place.ends()[0].reason == "exit-interval"
    elif switch == "checkpoint-now":
        answer = stage.tr11("checkpoint-now", "--yes", "--wait", "--timeout", "500")
        assert stage.place.manifest(answer["checkpoint"]) is not None
        return
    else:
        words = ["--now"] if switch == "kill-now" else []
        value = stage.tr11("kill", *words, "--yes", "--wait")
        assert value["ended"][0]["reason"] == "kill-switch"
        (end,) = stage.place.ends()
        if switch == "kill" and end.iteration:
            assert end.checkpoint_step == end.iteration
    stage.wait_for_hold()
    assert stage.attempts() == 1 and stage.waiting()


# ---------------------------------------------------------------------------
# The main job on real Slurm: array, time limit with early signal, resume, kill switch. 2 nodes
# x 2 workers.


# before the limit: for a save on a machine with other work, twenty times what it takes, and more
SIGNAL_SECONDS = 170
LOOK_SECONDS = (
    30  # Slurm looks so often whose signal is due, and sends one that is due before its next look
)


@pytest.fixture
def playground(tmp_path, twin):
    place = Playground(tmp_path, {**os.environ, **twin.environment, "COLUMNS": "80"})
    place.prepare()
    return place


def test_array_time_limit_resume_and_kill_switch(playground, twin):
    card = playground.card("tr11.toml", nodes=2, workers=2, dtype="bf16")
    signal = ["--set", f"slurm.signal_seconds_before_limit={SIGNAL_SECONDS}"]
    playground.tr11("launch", "--array", "1-3", "--scheduler", "slurm", "--run", card, *signal)
    slurm = SlurmScheduler(twin.environment)

    # Task 1 does not end before its limit, which comes when it has trained: Slurm's early signal
    # makes it save and leave.
    playground.wait(lambda: len(playground.steps()) >= 3, "task 1's steps")
    [running] = [job for job in slurm.jobs() if job.name == "small" and job.state.is_active]
    # due at its next look
    minutes = math.ceil((time.time() - running.start_time + SIGNAL_SECONDS - LOOK_SECONDS) / 60)
    sooner = ["scontrol", "update", f"JobId={running.job_id}", f"TimeLimit={minutes}"]
    subprocess.run(sooner, env=dict(playground.environment), check=True)
    playground.wait(lambda: len(playground.ends()) == 1, "the first attempt")
    first = playground.ends()[0]
    assert (first.reason, first.restart) == ("signal", True)
    assert first.checkpoint_step == first.iteration >= 3
    assert playground.manifest(first.iteration) is not None

    # Task 2 goes on where task 1 stopped.
    playground.wait(
        lambda: playground.steps()[-1]["iteration"] >= first.iteration + 3, "task 2's steps"
    )

    # Any one look on a loaded machine may see too little, so it is looked until one has seen the
    # training.
    def is_seen_training() -> bool:
        status = playground.tr11("status", "--run", card, "--json", expect=None).stdout
        return any(f'"{word}"' in status for word in MOVING)

    playground.wait(is_seen_training, "a status that sees task 2 train")
    playground.tr11("kill", "--run", card, "--yes", "--wait", "--reason", "a test")

    # Task 3 is held; one that is let go by mistake finds the switch and does not train.
    [waiting] = [job for job in slurm.jobs() if job.name == "small" and not job.state.is_final]
    assert tasks_of(waiting) == (3,)
    playground.wait(lambda: reason(slurm, waiting.job_id).startswith("JobHeld"), "the hold")
    assert len(playground.ends()) == 2
    slurm.release(waiting.array_id)
    playground.wait(lambda: len(playground.ends()) == 3, "all attempts")
    _, second, third = playground.ends()
    assert second.reason == third.reason == "kill-switch"
    assert second.checkpoint_step == second.iteration > first.iteration
    assert playground.manifest(second.iteration) is not None
    jobs = {
        end.job_id: [
            step["iteration"] for step in playground.steps() if step["job_id"] == end.job_id
        ]
        for end in playground.ends()
    }
    assert jobs[second.job_id][0] == first.iteration + 1
    assert jobs[third.job_id] == []
    out = [path.name for path in playground.folder.rglob("*.out")]
    assert len(out) == 3, out
    playground.tr11("status", "--run", card)


def reason(slurm: SlurmScheduler, job_id: str) -> str:
    """Why this job waits, as Slurm says now."""
    return next(job.reason for job in slurm.jobs() if job.job_id == job_id)

"""Goodput of a run on real Slurm that meets a fault, a restart inside its allocation and a kill switch.

What it should be is told by others: Slurm's times of the jobs, the moments at which this test acted, the steps' own
measure of their length, and the lines of the log about saves.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.launch.run_inputs import write_dataset
from tr11ops.cli.main import execute
from tr11ops.cluster.base import Job
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.goodput.account import Goodput, account
from tr11ops.goodput.history import read_history
from tr11ops.goodput.timeline import Bucket
from tr11ops.rundir.paths import RunDirectory
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.twin import Twin
from trainer.contract.paths import RunPaths

PATIENCE_SECONDS = 600.0
CARD = """
[run]
name = "goodput"
directory = "run"
[rehearsal]
time_scale = 100
start_seconds = 100
step_seconds = 40
save_seconds = 40
evaluation_seconds = 50
bytes_per_rank = 256
collective_seconds = 6000
[slurm]
nodes = 2
spare_nodes = 1
workers_per_node = 1
time_limit = "00:30:00"
[model]
layers = 2
hidden_size = 32
attention_heads = 4
sequence_length = 32
[batch]
micro_batch_size = 2
global_batch_size = 12
train_samples = 12_000_000
[schedule]
learning_rate = 1e-3
[checkpoint]
interval = 4
[evaluation]
interval = 6
iterations = 1
[data]
prefixes = ["data/none"]
[tokenizer]
padded_vocabulary_size = 512
[logging]
tensorboard = false
[resilience]
end_within_seconds = 8
exclusion_cap_percent = 50
"""


class Stage:
    """A run in the current folder, on the twin that the environment names."""

    def __init__(self, folder: Path, twin: Twin) -> None:
        self.slurm, self.twin = SlurmScheduler(twin.environment), twin
        self.paths = RunPaths(folder / "run", "goodput", "main")
        self.directory = RunDirectory(self.paths, self.paths.root / "kill-switch")
        write_dataset(folder / "data" / "none")
        (folder / "tr11.toml").write_text(CARD)

    def jobs(self) -> tuple[Job, ...]:
        return tuple(job for job in self.slurm.jobs() if job.name == "goodput")

    def steps(self) -> list[dict[str, Any]]:
        if not self.paths.metrics.exists():
            return []
        found = [json.loads(line) for line in self.paths.metrics.read_text().splitlines()]
        return [step for step in found if step["kind"] == "step"]

    def iteration(self, job: str = "") -> int:
        return max((step["iteration"] for step in self.steps() if job in {"", step["job_id"]}), default=0)

    def attempts(self) -> list[str]:
        return sorted((path.parent.name for path in self.paths.attempts.glob("*/attempt.json")), key=int)

    def launches(self, attempt: str) -> list[dict[str, Any]]:
        paths = sorted((self.paths.attempt(attempt) / "launches").glob("*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > until:
                raise AssertionError(f"{what}: not in time; load {os.getloadavg()}")
            time.sleep(0.1)


@pytest.fixture
def stage(twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name, value in twin.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    made = Stage(tmp_path, twin)
    yield made
    assert not [healing.error for healing in heal(twin) if healing.error]
    for job in made.jobs():
        if not job.state.is_final:
            made.slurm.cancel(job.array_id or job.raw_id)
    made.wait(lambda: all(job.state.is_final for job in made.jobs()), "the end of all jobs")


def wall(goodput: Goodput, bucket: Bucket) -> float:
    return goodput.buckets[bucket].wall_micros / 1e6


def test_a_fault_a_restart_and_a_switch_cost_what_they_cost(stage: Stage) -> None:
    submitted = time.time()
    assert execute(["launch", "--array", "1-3", "--scheduler", "slurm"]) == 0
    launching = time.time() - submitted  # the submission is noted at some moment of the command's time
    stage.wait(lambda: stage.iteration() >= 9, "nine steps")
    (first,) = stage.attempts()
    victim = stage.launches(first)[0]["nodes"][1]
    struck = time.time()
    inject(stage.twin, "worker-crash", node=victim)
    strike = time.time() - struck
    stage.wait(lambda: len(stage.launches(first)) == 2, "the second launch")
    again = stage.launches(first)[1]["start"]
    stage.wait(lambda: [step for step in stage.steps() if step["time"] > again][3:], "four steps of it")
    assert execute(["kill", "--yes", "--wait", "--reason", "a test"]) == 0
    ended = next(job.end_time for job in stage.jobs() if job.raw_id == first)
    assert ended is not None
    time.sleep(2.5)
    resumed = time.time()
    assert execute(["resume", "--yes"]) == 0
    slack = time.time() - resumed  # the command lets go at some moment of its time
    stage.wait(lambda: len(stage.attempts()) == 2, "the second attempt")
    second = stage.attempts()[1]
    stage.wait(lambda: [step for step in stage.steps() if step["job_id"] == second][2:], "its steps")
    now = time.time()
    jobs = stage.jobs()
    goodput = account(read_history(stage.directory, jobs), now)

    steps = [step for step in stage.steps() if step["time"] <= now]
    of_first = [step for step in steps if step["job_id"] == first]
    before = [step for step in of_first if step["time"] < again]
    resumed_at = min(step["iteration"] for step in of_first if step["time"] > again) - 1
    lost = [step for step in before if step["iteration"] > resumed_at]
    starts = {
        job.raw_id: job.start_time for job in jobs if job.start_time is not None and job.raw_id in stage.attempts()
    }
    log = stage.paths.main_log.read_text(errors="replace")
    saves = [float(found) / 1000 for found in re.findall(r"time \(ms\) \| save-checkpoint: ([\d.]+)", log)]
    evaluations = log.count("validation loss at iteration")
    seconds = {step["time"]: step["seconds_per_iteration"] for step in steps}
    kept = sum(seconds.values()) - sum(step["seconds_per_iteration"] for step in lost)
    last = before[-1]
    truth = {
        Bucket.QUEUE: starts[first] - submitted - launching + starts[second] - resumed,
        Bucket.OPERATOR_PAUSE: resumed - ended,
        Bucket.USEFUL: kept,
        Bucket.SAVE: sum(saves),
        Bucket.EVALUATION: 0.5 * evaluations,
        # The lost steps, and the one under way when the worker died.
        Bucket.REDONE: sum(step["seconds_per_iteration"] for step in lost) + struck - last["time"],
    }
    for bucket, expected in truth.items():
        # Slurm cuts its times to whole seconds: a job begins up to one before the moment that let it go, and ends up
        # to one before its controller's last word. A wait has one such end, a pause lies between two.
        extra = {Bucket.QUEUE: 1.0 + slack + launching, Bucket.OPERATOR_PAUSE: 1.0 + slack, Bucket.REDONE: strike}
        within = 1.0 + extra.get(bucket, 0.0)
        assert wall(goodput, bucket) == pytest.approx(expected, abs=within), bucket
    total = sum(
        (min(job.end_time or now, now) - job.start_time) * 3 for job in jobs if job.raw_id in starts and job.start_time
    )
    assert goodput.total.held_micros / 1e6 == pytest.approx(total, abs=6.0)  # two jobs, three nodes, whole seconds
    assert wall(goodput, Bucket.UNKNOWN) <= 0.01 * (now - submitted)
    (fault,) = goodput.faults
    assert (fault.cause, fault.job_id, fault.launch) == ("node", first, 1)
    assert fault.time == pytest.approx(struck, abs=1.0 + strike)
    assert goodput.buckets[Bucket.NODE_LOST].node_micros / 1e6 == pytest.approx(
        ended - stage.launches(first)[0]["end"], abs=1.5
    )

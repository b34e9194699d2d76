"""Goodput of a run on real Slurm that meets a fault, a restart inside its allocation and a kill
switch.

What it should be is told by others: Slurm's times of the jobs, the moments at which this test
acted, the steps' own measure of their length, and the lines of the log about saves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.twin.small_run import SmallRun, enter, on_stage
from tr11ops.cli.main import execute
from tr11ops.goodput.account import Goodput, account
from tr11ops.goodput.history import read_history
from tr11ops.goodput.timeline import Bucket
from tr11ops.twin.faults import inject
from tr11ops.twin.twin import Twin

CHANGES = (
    "slurm.nodes=2", "slurm.workers_per_node=1", "parallel.tensor=1", "checkpoint.interval=4", "evaluation.interval=6",
    "evaluation.iterations=1", "rehearsal.start_seconds=100", "rehearsal.step_seconds=40", "rehearsal.save_seconds=40",
    "rehearsal.evaluation_seconds=50",
)  # fmt: skip


@pytest.fixture
def stage(twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallRun]:
    enter(twin, tmp_path, monkeypatch)
    with on_stage(SmallRun(tmp_path, twin)) as run:
        yield run


def wall(goodput: Goodput, bucket: Bucket) -> float:
    return goodput.buckets[bucket].wall_micros / 1e6


def test_a_fault_a_restart_and_a_switch_cost_what_they_cost(stage: SmallRun) -> None:
    submitted = time.time()
    stage.launch(3, *CHANGES)
    # the submission is noted at some moment of the command's time
    launching = time.time() - submitted
    stage.wait(lambda: stage.iteration() >= 9, "nine steps")
    (first,) = stage.attempts()
    victim = stage.launches(first)[0]["nodes"][1]
    struck = time.time()
    inject(stage.twin, "worker-crash", node=victim)
    stage.wait(lambda: len(stage.launches(first)) == 2, "the second launch")
    again = stage.launches(first)[1]["start"]
    stage.wait(
        lambda: [step for step in stage.steps() if step["time"] > again][3:], "four steps of it"
    )
    assert execute(["kill", "--yes", "--wait", "--reason", "a test"]) == 0
    ended = next(job.end_time for job in stage.jobs() if job.raw_id == first)
    assert ended is not None
    time.sleep(2.5)
    resumed = time.time()
    assert execute(["resume", "--yes"]) == 0
    slack = time.time() - resumed  # the command lets go at some moment of its time
    stage.wait(lambda: len(stage.attempts()) == 2, "the second attempt")
    second = stage.attempts()[1]
    stage.wait(
        lambda: [step for step in stage.steps() if step["job_id"] == second][2:], "its steps"
    )
    now = time.time()
    jobs = stage.jobs()
    goodput = account(read_history(stage.directory, jobs), now)
    # the worker dies at some moment of the fault's time, and its agent sees it later on a busy machine
    (fault,) = goodput.faults
    assert (fault.cause, fault.job_id, fault.launch) == ("node", first, 1)
    assert struck - 1.0 <= fault.time <= stage.launches(first)[0]["end"] + 1.0

    steps = [step for step in stage.steps() if step["time"] <= now]
    of_first = [step for step in steps if step["job_id"] == first]
    before = [step for step in of_first if step["time"] < again]
    resumed_at = min(step["iteration"] for step in of_first if step["time"] > again) - 1
    lost = [step for step in before if step["iteration"] > resumed_at]
    starts = {
        job.raw_id: job.start_time
        for job in jobs
        if job.start_time is not None and job.raw_id in stage.attempts()
    }
    log = stage.paths.main_log.read_text(errors="replace")
    saves = [
        float(found) / 1000
        for found in re.findall(r"time \(ms\) \| save-checkpoint: ([\d.]+)", log)
    ]
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
        Bucket.REDONE: sum(step["seconds_per_iteration"] for step in lost)
        + fault.time
        - last["time"],
    }
    for bucket, expected in truth.items():
        # Slurm cuts its times to whole seconds: a job begins up to one before the moment that let
        # it go, and ends up to one before its controller's last word. A wait has one such end, a
        # pause lies between two.
        extra = {
            Bucket.QUEUE: 1.0 + slack + launching,
            Bucket.OPERATOR_PAUSE: 1.0 + slack,
        }
        within = 1.0 + extra.get(bucket, 0.0)
        assert wall(goodput, bucket) == pytest.approx(expected, abs=within), bucket
    total = sum(
        (min(job.end_time or now, now) - job.start_time) * 3
        for job in jobs
        if job.raw_id in starts and job.start_time
    )
    # two jobs, three nodes, whole seconds
    assert goodput.total.held_micros / 1e6 == pytest.approx(total, abs=6.0)
    assert wall(goodput, Bucket.UNKNOWN) <= 0.01 * (now - submitted)
    assert goodput.buckets[Bucket.NODE_LOST].node_micros / 1e6 == pytest.approx(
        ended - stage.launches(first)[0]["end"], abs=1.5
    )

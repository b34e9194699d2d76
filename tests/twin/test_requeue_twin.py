"""A plain command whose job goes back into the queue, on a real Slurm: at the limit, and not otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.twin.small_run import begin_again, job_in
from tests.waiting import end_of_file, until
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.twin.twin import Twin

TR11 = Path(sys.executable).parent / "tr11"
# it saves when it is asked to stop, and leaves with 0, as most trainers do
TRAINER = """\
import os, pathlib, signal, subprocess, sys, time
restart, mode = os.environ.get("SLURM_RESTART_COUNT", "0"), sys.argv[1]
def leave(number, _):
    name = signal.Signals(number).name
    pathlib.Path("ckpt").mkdir(exist_ok=True)
    pathlib.Path("ckpt", f"{mode}-{restart}").write_text(name)
    print(f"{mode}: start {restart} heard {name}", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGUSR1, leave)
if mode == "nested":
    done = subprocess.run([sys.argv[2], "requeue", "--before", "5", "--", "true"], capture_output=True, text=True)
    print(f"nested: {done.returncode} {done.stderr}", flush=True)
if mode == "short" or restart != "0":
    sys.exit(7 if mode == "short" else 0)
pathlib.Path("began-" + mode).touch()
time.sleep(600)
"""


class Place:
    """A folder in which foreign jobs run on the twin."""

    def __init__(self, folder: Path, twin: Twin, slurm: SlurmScheduler) -> None:
        self.folder, self.twin, self.slurm = folder, twin, slurm
        (folder / "train.py").write_text(TRAINER)

    def submit(self, name: str, line: str, **options: Any) -> str:
        """Submit a batch script whose last line calls `tr11 requeue`."""
        settings = {"time_limit_seconds": 600, "requeue": True, **options}
        request = BatchRequest(
            script=f"#!/bin/bash\n{line}\n", name=name, nodes=1, working_directory=self.folder,
            output=str(self.folder / f"{name}.out"), partition=self.twin.plan.partition,
            options=(("open-mode", "append"),), **settings,
        )  # fmt: skip
        return self.slurm.submit(request)

    def said(self, name: str) -> str:
        return end_of_file(self.folder / f"{name}.out")

    def wait(self, job_id: str, *states: JobState) -> Job:
        return job_in(self.slurm, job_id, states, self.folder)

    def wait_for_requeue(self, job_id: str) -> None:
        until(lambda: any(start["requeued"] for start in self.starts(job_id)), job_id, pause=0.3)
        self.wait(job_id, JobState.PENDING)

    def starts(self, job_id: str) -> list[dict[str, Any]]:
        """What is on record of the starts of a job."""
        files = sorted((self.folder / ".tr11-requeue" / job_id).glob("start-*.json"))
        return [json.loads(path.read_text()) for path in files]


@pytest.fixture
def place(twin: Twin, slurm: SlurmScheduler, tmp_path: Path) -> Place:
    return Place(tmp_path, twin, slurm)


def call(mode: str, *options: str) -> str:
    return f"{TR11} requeue {' '.join(options)} -- {sys.executable} train.py {mode}"


def test_a_task_goes_back_at_its_limit_and_ends_when_it_is_done(place: Place) -> None:
    """Of two tasks of an array: the other one, which ends by itself, is let be."""
    line = (
        f'if [ "$SLURM_ARRAY_TASK_ID" = 2 ]; then {call("short", "--before 25")}; exit; fi\n'
        f"{call('nested ' + str(TR11), '--before 25 --progress ckpt')} && echo never\n"
        "echo code=$?"
    )
    array = place.submit("limit", line, time_limit_seconds=60, array="1-2")
    first, second = f"{array}_1", f"{array}_2"
    place.wait_for_requeue(first)
    assert place.wait(second, JobState.FAILED).exit_code == 7
    assert [start["requeued"] for start in place.starts(second)] == [False]
    [start] = place.starts(first)
    assert (start["asked"], start["status"]) == ("limit", 0), place.said("limit")
    assert (start["requeued"], start["progressed"]) == (True, True)
    begin_again(first, place.twin.environment)
    place.wait(first, JobState.COMPLETED)
    said = place.said("limit")
    assert said.count("back into the queue") == 1 and "start 0 heard SIGTERM" in said
    assert said.count("code=") == 1 and "code=0" in said, "nothing ran behind the first start"
    assert "nested: 2 " in said and "has a `tr11 requeue` already" in said
    assert [one["requeued"] for one in place.starts(first)] == [True, False]


def test_a_cancelled_job_stays_cancelled_and_a_warned_one_goes_back(place: Place) -> None:
    """The warning is the batch shell's alone (--signal=B:USR1), in whose place it is."""
    warned = place.submit(
        "warned", f"exec {call('warned', '--before 5')}", time_limit_seconds=60,
        signal_seconds_before_limit=25,
    )  # fmt: skip
    number = place.submit("cancelled", call("cancelled"))
    until((place.folder / "began-cancelled").exists)
    place.slurm.cancel(number)
    place.wait(number, JobState.CANCELLED)
    until(lambda: place.starts(number)[0]["why"], context=lambda: place.said("cancelled"))
    [start] = place.starts(number)
    assert not start["requeued"] and "cancelled" in start["why"]
    assert "cancelled: start 0 heard SIGTERM" in place.said("cancelled")
    place.wait_for_requeue(warned)
    assert "warned: start 0 heard SIGTERM" in place.said("warned")
    assert [start["asked"] for start in place.starts(warned)] == ["warned"]


def test_a_job_that_may_not_go_back_is_refused_in_one_line(place: Place) -> None:
    """Nor is one without a limit. The command is not begun."""
    script = f"{TR11} requeue -- touch ran\necho code=$?"
    kept = place.submit("kept", script, requeue=False)
    endless = place.submit("endless", f"sleep 2\n{script}")
    done = subprocess.run(
        ["scontrol", "update", f"JobId={endless}", "TimeLimit=UNLIMITED"],
        env=place.slurm._environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    for number, name, said in (
        (kept, "kept", f"job {kept} may not be put back into the queue"),
        (endless, "endless", f"job {endless} has no time limit"),
    ):
        place.wait(number, JobState.COMPLETED)
        lines = place.said(name).splitlines()
        assert len(lines) == 2 and said in lines[0] and lines[1] == "code=2", (lines, done.stderr)
    assert not (place.folder / "ran").exists()

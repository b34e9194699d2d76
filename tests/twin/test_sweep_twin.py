"""A study on a real Slurm: one array of three cells, each a run of its own to every command."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.launch.run_inputs import write_card
from tests.twin.small_run import begin_again, enter
from tests.waiting import until
from tr11ops.cli.main import execute
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.rundir.paths import parse_comment
from tr11ops.twin.twin import Twin

BATCH = "batch.global_batch_size"
WHOLE = ("--set", "slurm.gpus_per_node=8", "--set", "slurm.workers_per_node=1")


@pytest.fixture
def place(
    twin: Twin, slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder with a card, in which commands reach the twin, whose nodes are all taken."""
    enter(twin, tmp_path, monkeypatch)
    write_card(tmp_path)
    nodes = twin.plan.gpu_node_names
    blocker = slurm.submit(
        BatchRequest("#!/bin/bash\nsleep 600\n", "block", len(nodes), 900, str(tmp_path / "b.out"), tmp_path,
                     gpus_per_node=8)
    )  # fmt: skip
    until(lambda: (job := slurm.job(blocker)) is not None and job.state.is_active)
    yield tmp_path


def typed(capture: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capture.readouterr()
    code = execute([*words])
    out, err = capture.readouterr()
    assert "Traceback" not in out + err
    return code, out + err


def document(capture: pytest.CaptureFixture[str], *words: str) -> Any:
    capture.readouterr()
    assert execute([*words, "--json"]) == 0
    return json.loads(capture.readouterr().out)


def living(slurm: SlurmScheduler) -> dict[str, Job]:
    return {
        job.job_id: job
        for job in slurm.jobs()
        if job.name == "small-sweep" and not job.state.is_final
    }


def test_three_cells_are_one_array_and_three_runs(
    place: Path, slurm: SlurmScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    done = document(capsys, "sweep", "--run", "small.toml", "--grid", f"{BATCH}=8,16,32", "--directory", "study",
                    "--at-once", "2", *WHOLE)  # fmt: skip
    number = done["job_id"]
    rows = subprocess.run(["squeue", "--noheader", "--name=small-sweep", "--Format=JobArrayID:.40"], capture_output=True,
                          text=True, check=True).stdout.split()  # fmt: skip
    assert done["submitted"] and rows == [f"{number}_[1-3%2]"]  # to Slurm it is one array
    jobs = living(slurm)
    assert list(jobs) == [f"{number}_{task}" for task in (1, 2, 3)]
    assert jobs == {
        job.job_id: job for job in slurm.jobs(name="small-sweep") if not job.state.is_final
    } or all(
        parse_comment(job.comment) == parse_comment(jobs[job.job_id].comment)
        for job in slurm.jobs(name="small-sweep")
    )
    seen = document(capsys, "sweep", "status", "study")
    assert [(cell["state"], cell["job_ids"]) for cell in seen["cells"]] == [
        ("queued", [f"{number}_{task}"]) for task in (1, 2, 3)
    ]
    second = "study/batch16/tr11.toml"
    told = document(capsys, "status", "--run", second, "--scheduler", "slurm")
    assert told["verdict"] == "queued" and [job["id"] for job in told["jobs"]] == [f"{number}_2"]
    again = typed(capsys, "launch", "--run", second, "--scheduler", "slurm")
    assert again[0] == 1 and f"this run is already queued: job {number}_2" in again[1]

    # holds its own task alone
    assert typed(capsys, "kill", "--run", second, "--scheduler", "slurm", "--yes")[0] == 0
    held = {job_id: "Held" in job.reason for job_id, job in living(slurm).items()}
    assert held == {f"{number}_1": False, f"{number}_2": True, f"{number}_3": False}
    slurm.cancel(f"{number}_3")
    assert document(capsys, "sweep", "resume", "study")["taken_up"] == ["batch32"]
    assert len(living(slurm)) == 3
    asked = document(capsys, "sweep", "stop", "study", "--yes")["asked"]
    assert len(asked) == 3
    until(lambda: not living(slurm))


def test_a_task_runs_its_own_cells_script(
    place: Path, slurm: SlurmScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """What starts is a single job of its run: the agent knows of no array, and its attempt is in
    its own directory.
    """
    done = document(
        capsys,
        "sweep",
        "--run",
        "small.toml",
        "--grid",
        f"{BATCH}=8,16",
        "--directory",
        "study",
        *WHOLE,
    )
    scripts = {
        path.parents[3].name: path
        for path in place.glob("study/*/state/submissions/*/train.sbatch")
    }
    for name, path in scripts.items():
        output = (
            f"{path.parent}/$SLURM_JOB_NAME-$SLURM_JOB_ID.out"  # as the cell's own script opens it
        )
        line = f'echo "{name} ${{SLURM_ARRAY_JOB_ID:-none}} $SLURM_JOB_ID $PWD" >{output}'
        path.write_text(f"#!/bin/bash\n{line}\n")
    [blocker] = [job for job in slurm.jobs() if job.name == "block" and not job.state.is_final]
    slurm.cancel(blocker.raw_id)
    until(lambda: not living(slurm))
    said = {name: (path.parent / f"small-sweep-{job.raw_id}.out").read_text().split()
            for name, path in scripts.items()
            for job in slurm.jobs()
            if job.job_id == f"{done['job_id']}_{('batch8', 'batch16').index(name) + 1}"}  # fmt: skip
    assert {name: (words[0], words[1], words[3]) for name, words in said.items()} == {
        name: (name, "none", str(place / "study" / name)) for name in ("batch8", "batch16")
    }
    states = [cell["state"] for cell in document(capsys, "sweep", "status", "study")["cells"]]
    assert states == ["not begun", "not begun"]


@pytest.mark.parametrize("lost", ["the study", "its outputs"])
def test_no_cell_is_burned_where_the_study_is_not_seen(
    place: Path, slurm: SlurmScheduler, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    """A cell has one task: one that cannot begin goes back into the queue, and trains when the
    study is there again.
    """
    typed(
        capsys,
        "sweep",
        "--run",
        "small.toml",
        "--grid",
        f"{BATCH}=8,16",
        "--directory",
        "study",
        *WHOLE,
    )
    for path in place.glob("study/*/state/submissions/*/train.sbatch"):
        path.write_text(f"#!/bin/bash\ntouch {place}/ran-$SLURM_JOB_ID\n")
    study = place / "study"
    gone = study if lost == "the study" else study / "arrays"
    hidden = gone.rename(place / "hidden")
    [blocker] = [job for job in slurm.jobs() if job.name == "block" and not job.state.is_final]
    slurm.cancel(blocker.raw_id)
    if lost == "the study":

        def is_back() -> bool:
            jobs = living(slurm).values()
            return len(jobs) == 2 and all(
                job.state is JobState.PENDING and job.reason == "BeginTime" for job in jobs
            )

        until(is_back, "both tasks are queued again", context=slurm.jobs)
        assert not list(place.glob("ran-*")) and not study.exists()
        hidden.rename(gone)
        for job in living(slurm).values():
            begin_again(job.job_id, os.environ)
    until(lambda: len(list(place.glob("ran-*"))) == 2, "both cells ran", context=slurm.jobs)
    until(lambda: not living(slurm))


def test_a_cell_that_goes_back_into_the_queue_leaves_the_others_running(
    place: Path, slurm: SlurmScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last task of an array to begin has the array's own number, by which Slurm requeues them
    all.
    """
    typed(
        capsys,
        "sweep",
        "--run",
        "small.toml",
        "--grid",
        f"{BATCH}=8,16,32",
        "--directory",
        "study",
        *WHOLE,
    )
    for path in place.glob("study/*/state/submissions/*/train.sbatch"):
        path.write_text(f"#!/bin/bash\ntouch {place}/ran-$SLURM_JOB_ID\nsleep 600\n")
    (place / "study" / "batch32").rename(place / "hidden")
    [number] = {job_id.partition("_")[0] for job_id in living(slurm)}
    [blocker] = [job for job in slurm.jobs() if job.name == "block" and not job.state.is_final]
    slurm.cancel(blocker.raw_id)
    until(
        lambda: living(slurm)[f"{number}_3"].reason == "BeginTime",
        "the third is queued again",
        context=slurm.jobs,
    )
    until(lambda: len(list(place.glob("ran-*"))) == 2, "two cells train", context=slurm.jobs)
    running = {job_id for job_id, job in living(slurm).items() if job.state is JobState.RUNNING}
    assert running == {f"{number}_1", f"{number}_2"}

"""A foreign trainer in an image: the keeper stays on the host, the workers see the image's root, and
nothing of tr11 is in it.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from tests.tr11ops.trainers.images import Images
from tests.tr11ops.trainers.kept import PLAIN, KeptTraining, wait_until
from tr11ops.dialects.image import TrainerImage
from tr11ops.dialects.settings import TrainerSettings, settings_of
from tr11ops.trainers.start import (
    LaunchWords,
    TakenCheckpoint,
    commands_of,
    refusal_of,
)
from tr11ops.trainers.trainer import NodePlaces
from tr11ops.trainers.workers import marked_processes, node_name
from trainer.contract.attempt import request_stop
from trainer.contract.paths import RunPaths

JOB = str(os.getpid())  # what ends an earlier launch knows it by its job
PLACES = NodePlaces(2, 1, 4, address="n1", port=29500)
LAUNCH = LaunchWords(RunPaths(Path("/run"), "toy", "main"), Path("/run/state/attempts/7"), 2)
PYXIS = TrainerImage("nvcr.io#nvidia/pytorch:25.01", "pyxis", mounts=("/out:/ck", "/d:/d:ro"))


def settings(**table: Any) -> TrainerSettings:
    return settings_of({"command": ["train.py"], "folder": "/out", **table}, "card")


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    made = Images(tmp_path)
    made.require()
    monkeypatch.setenv("PATH", f"{made.path}{os.pathsep}{os.environ['PATH']}")
    return made


def training(
    tmp_path: Path, image: Path, runtime: str, start: str, steps: int = 12
) -> KeptTraining:
    run = KeptTraining(tmp_path / "run")
    run.out.mkdir()
    program = ["loop.py", "{folder}", str(steps), "4"]
    if start != "torchrun":
        program = ["python3", "-u", *program]
    table: dict[str, Any] = {**PLAIN, "stop": {"how": "signal TERM"}, "start": start}
    run.write_card(program, **{**table, "python": "python3", "directory": "/opt/app"})
    value = json.loads(run.card.read_text())
    container = {"image": str(image), "runtime": runtime, "mounts": [f"{run.out}:/ck"]}
    run.card.write_text(json.dumps({**value, "slurm": {"container": container}}))
    return run


# ----------------------------------------------------------------------------- words
def test_paths_are_those_of_the_image() -> None:
    """The folder's mount has another name there; what the training cannot do without is mounted."""
    given = settings(
        dialect="huggingface", command=["t.py", "--to", "{folder}"], directory="/work", unset=["SLURM_NTASKS"]
    )  # fmt: skip
    taken = TakenCheckpoint(5000, "/out/checkpoint-5000", "checkpoint-5000")
    launch = LaunchWords(LAUNCH.paths, LAUNCH.attempt, 2, taken, node="n7")
    (command,) = commands_of(_with(given, PYXIS), PLACES, launch)
    words = command.words
    assert words[0] == "srun" and {"--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n7"} <= set(
        words
    )
    assert f"--container-image={PYXIS.image}" in words and "--no-container-entrypoint" in words
    assert "--container-mounts=/out:/ck,/d:/d:ro,/run:/run,/work:/work" in words
    assert "--container-workdir=/work" in words
    place = words.index("env")
    assert words[place : place + 6] == (
        "env",
        "-u",
        "SLURM_NTASKS",
        "python",
        "-m",
        "torch.distributed.run",
    )
    assert words[-4:] == ("--to", "/ck", "--resume_from_checkpoint", "/ck/checkpoint-5000")
    apptainer = TrainerImage(
        "/i.sif", "apptainer", mounts=("/all",), options=("--fakeroot",), uses_gpus=True
    )
    (command,) = commands_of(_with(settings(start="node", directory="/in"), apptainer), PLACES, LaunchWords(
        LAUNCH.paths, LAUNCH.attempt, 1, has_directory=False
    ))  # fmt: skip
    assert command.words == (
        "apptainer", "exec", "--nv", "--bind", "/all", "--bind", "/run", "--bind", "/out", "--fakeroot",
        "--pwd", "/in", "/i.sif", "python", "train.py",
    )  # fmt: skip


def test_what_an_image_makes_wrong_is_refused() -> None:
    assert "once for each worker" in refusal_of(_with(settings(start="srun"), PYXIS))
    docker = settings(start="node", command=["docker", "run", "--rm", "i", "torchrun", "t.py"])
    assert "could not end it" in refusal_of(docker)


def _with(given: TrainerSettings, image: TrainerImage) -> TrainerSettings:
    return replace(given, image=image)


# ----------------------------------------------------------------------------- real roots
@pytest.mark.parametrize(("runtime", "start"), [("apptainer", "srun"), ("pyxis", "torchrun")])
def test_it_trains_in_the_image_to_its_end(
    images: Images, tmp_path: Path, runtime: str, start: str
) -> None:
    run = training(tmp_path, images.image, runtime, start)
    with images.steps():
        assert run.run(job=JOB) == 0, run.said()
    assert "inside True None /opt/app" in run.said()
    end = run.end(JOB)
    assert end is not None and (end.reason, end.iteration, end.checkpoint_step) == (
        "finished",
        12,
        12,
    )
    assert [one.iteration for one in run.steps()] == list(range(1, 13))
    assert run.paths.checkpoint(12).is_dir()


@pytest.mark.parametrize(("runtime", "start"), [("apptainer", "srun"), ("pyxis", "torchrun")])
def test_a_stop_reaches_the_ranks_in_the_image(
    images: Images, tmp_path: Path, runtime: str, start: str
) -> None:
    run = training(tmp_path, images.image, runtime, start, steps=400)
    with images.steps(), run.kept(job=JOB) as keeper:
        wait_until(lambda: run.iteration() >= 3)
        request_stop(run.paths.stop_request(JOB), "a test")
        assert keeper.wait(timeout=60) == 0, run.said()
    assert "TERM to 2 ranks of this node" in run.said()
    end = run.end(JOB)
    assert end is not None and (end.reason, end.restart) == ("signal", True)
    assert end.checkpoint_step is not None and end.iteration < 400


def test_what_a_killed_keeper_left_under_pyxis_is_ended(images: Images, tmp_path: Path) -> None:
    """Neither its end nor srun's ends a step at once; the next launch on the node does, first of all."""
    run = training(tmp_path, images.image, "pyxis", "torchrun", steps=4000)
    with images.steps():
        with run.kept(job=JOB) as keeper:
            wait_until(lambda: run.iteration() >= 2)
            # srun first, which would end the step in order when it sees the keeper die
            keeper.send_signal(signal.SIGSTOP)
            for process in psutil.Process(keeper.pid).children():
                process.kill()
            keeper.kill()
            keeper.wait()
        mark = f"{JOB}/{node_name()}/1"
        assert marked_processes(
            mark
        )  # a rank that prints dies of its closed pipe, the others go on
        with run.kept(job=JOB, launch=2):
            wait_until(lambda: "of an earlier launch still ran here: ended" in run.said())
            wait_until(lambda: marked_processes(mark) == [])
    assert marked_processes(f"{JOB}/{node_name()}/2") == []

"""`slurm.container`: what stands on srun's line, and what a launch says of an image that cannot
run.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.launch.preflight_bench import Bench
from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.agent.step import WorkerLaunch, srun_command
from tr11ops.base.observed import Unknown
from tr11ops.launch.container import ContainerFacts
from tr11ops.launch.facts import LaunchRequest
from tr11ops.launch.plan import plan_launch
from tr11ops.runcard.card import CardError, RunCard, load_card
from tr11ops.runcard.sections import ContainerSection
from tr11ops.rundir.paths import RunDirectory


def launch(section: dict[str, Any] | None, **changes: Any) -> WorkerLaunch:
    container = None if section is None else ContainerSection(**section)
    return WorkerLaunch(
        1, Path("/run/state/attempts/7"), Path("/run/card.json"), "7", ("x1", "x2"), 8, "10.0.0.1", 6000, container,
        **changes,
    )  # fmt: skip


def before_agent(command: list[str]) -> list[str]:
    """What stands between srun's own options and the node agent's module."""
    return command[command.index("x1,x2") + 1 : command.index("-m")]


PYXIS = {
    "image": "nvcr.io#nvidia/pytorch:25.01",
    "runtime": "pyxis",
    "mounts": ["/scratch", "/data:/corpus:ro"],
}
APPTAINER = {
    "image": "/images/tr11.sif",
    "runtime": "apptainer",
    "mounts": ["/scratch"],
    "python": "/opt/bin/python3",
}


def test_the_agent_runs_in_the_image() -> None:
    assert before_agent(srun_command(launch(PYXIS))) == [
        "--container-image=nvcr.io#nvidia/pytorch:25.01", "--container-mounts=/scratch:/scratch,/data:/corpus:ro",
        "--no-container-entrypoint", "python3",
    ]  # fmt: skip
    assert before_agent(srun_command(launch(APPTAINER, uses_gpus=True))) == [
        "apptainer", "exec", "--nv", "--bind", "/scratch", "/images/tr11.sif", "/opt/bin/python3",
    ]  # fmt: skip
    assert "--nv" not in srun_command(launch(APPTAINER))


def test_without_it_the_line_is_what_it_was() -> None:
    bare, inside = srun_command(launch(None)), srun_command(launch(PYXIS))
    assert before_agent(bare) == [sys.executable]
    assert not [word for word in bare if "container" in word]
    # what ends the step is the same
    assert bare[: bare.index("x1,x2")] == inside[: inside.index("x1,x2")]


def test_the_line_starts_what_it_says(tmp_path: Path) -> None:
    """With a stand-in for Apptainer that runs the command outside any image: order, quoting and
    exit code.
    """
    runtime = tmp_path / "apptainer"
    runtime.write_text(
        '#!/bin/sh\nwhile [ "$1" != /images/tr11.sif ]; do shift; done\nshift\nexec "$@"\n'
    )
    runtime.chmod(0o755)
    command = srun_command(launch({**APPTAINER, "python": "python3"}))
    inner = command[command.index("apptainer") : command.index("tr11ops.agent.node") - 1]
    line = f"{shlex.join(inner)} -c 'import sys; print(sys.argv[1:]); sys.exit(7)' 'a b'"
    assert subprocess.run(["bash", "-n", "-c", line], check=False).returncode == 0
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (7, "['a b']\n")


def card_with(folder: Path, *overrides: str) -> RunCard:
    return load_card(write_card(folder), overrides, {})


def test_the_batch_script_is_the_same_with_and_without(tmp_path: Path) -> None:
    """It stays outside, with its signals."""
    settings = ("slurm.container.image=/i.sif", "slurm.container.runtime=apptainer")
    scripts = []
    for card in (card_with(tmp_path), card_with(tmp_path, *settings)):
        directory = RunDirectory(card.paths, card.kill_switch)
        scripts.append(
            plan_launch(
                card, directory, LaunchRequest(), (), "20260101-000000-00000000"
            ).request.script
        )
    assert scripts[0] == scripts[1]


@pytest.mark.parametrize(
    "setting",
    ["slurm.container.image=a b", "slurm.container.image=$(x)", 'slurm.container.mounts=["relative"]',
     'slurm.container.mounts=["/a:b"]', "slurm.container.runtime=docker"],
)  # fmt: skip
def test_what_no_runtime_takes_is_refused(tmp_path: Path, setting: str) -> None:
    good = ("slurm.container.image=/i.sif", "slurm.container.runtime=apptainer")
    with pytest.raises(CardError):
        card_with(tmp_path, *good, setting)


def test_a_launch_says_what_the_image_lacks(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    image = tmp_path / "tr11.sif"
    image.touch()
    bench.overrides = [
        f"slurm.container.image={image}", "slurm.container.runtime=apptainer", f'slurm.container.mounts=["{tmp_path}"]',
    ]  # fmt: skip
    seen = ContainerFacts(True, True)
    bench.changes = {"scheduler": "slurm", "container": seen}
    assert (
        bench.faults() == [] and f"container: {image} is there; apptainer, 1 mount" in bench.text()
    )
    bench.changes["container"] = ContainerFacts(None, True)
    assert "is an address, which the nodes must reach" in bench.text()
    bench.changes["container"] = ContainerFacts(True, False)
    assert (
        bench.code() == 0
        and "here apptainer is not found; a node without it ends every launch" in bench.text()
    )
    bench.changes["container"] = ContainerFacts(True, Unknown("no answer"))
    assert bench.code() == 0 and "apptainer could not be looked for (no answer)" in bench.text()
    bench.changes["container"] = ContainerFacts(False, True, ("/gone",))
    assert (
        bench.code() == 1
        and f"{image} is not there; build it" in bench.text()
        and "/gone is not there" in bench.text()
    )
    bench.changes = {"scheduler": "local"}
    assert (
        bench.code() == 2 and "runs the workers of Slurm's jobs, and this is none" in bench.text()
    )
    bench.overrides[2] = 'slurm.container.mounts=["/data:/corpus"]'
    bench.changes = {"scheduler": "slurm", "container": seen}
    assert bench.code() == 2 and f'the workers could save nothing; add "{tmp_path}"' in bench.text()
    bench.overrides[0] = "slurm.container.image=tr11.sif"
    assert "tr11.sif is a file; name it in full" in bench.text()


def test_the_files_themselves_are_looked_at(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.overrides = [
        f"slurm.container.image={tmp_path}/none.sif", "slurm.container.runtime=apptainer",
        f'slurm.container.mounts=["{tmp_path}", "{tmp_path}/none:/x"]',
    ]  # fmt: skip
    facts = bench.facts().container
    assert facts is not None and (facts.image_is_there, facts.missing_mounts) == (
        False,
        (f"{tmp_path}/none",),
    )

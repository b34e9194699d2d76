"""`[slurm.options]` on a real Slurm: what is passed through is what the job has, and a refusal
names the card's key.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.launch.run_inputs import write_card
from tests.twin.small_run import enter
from tr11ops.cli.main import execute
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.runcard.card import load_card
from tr11ops.rundir.paths import RunDirectory
from tr11ops.twin.twin import Twin

CARD = '[slurm.options]\nexclusive = true\nmem = "1000M"\nnice = 7\nswitches = "1@04:00"\ngres = "gpu:2"\n'


@pytest.fixture
def run(
    twin: Twin, slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunDirectory]:
    """A card with options in the current folder, whose job waits for a partition that is down."""
    enter(twin, tmp_path, monkeypatch)
    path = write_card(tmp_path)
    path.write_text(
        path.read_text().replace("nodes = 2\n", "nodes = 2\ngpus_per_node = 2\n") + "\n" + CARD
    )
    card = load_card(path, [], {}, directory=tmp_path)
    scontrol("update", "partitionname=gpu_p5", "state=DOWN")
    yield RunDirectory(card.paths, card.kill_switch)
    scontrol("update", "partitionname=gpu_p5", "state=UP")


def scontrol(*words: str) -> str:
    done = subprocess.run(
        ["scontrol", *words], check=True, capture_output=True, text=True, env=dict(os.environ)
    )
    return done.stdout


def test_what_the_card_passes_through_is_what_the_job_has(
    run: RunDirectory, slurm: SlurmScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["launch", "--array", "1-2", "--run", "small.toml", "--scheduler", "slurm"]) == 0
    said = capsys.readouterr().out
    assert "options  exclusive, mem=1000M, nice=7, switches=1@04:00, gres=gpu:2" in said
    [job] = [job for job in slurm.jobs() if job.name == "small" and not job.state.is_final]
    shown = scontrol("show", "job", job.raw_id)
    for words in (
        "OverSubscribe=NO",
        "MinMemoryNode=1000M",
        "Nice=7",
        "TresPerNode=gres:gpu:2",
        "Switches=1@00:04:00",
    ):
        assert words in shown, shown
    [submission] = run.read_submissions()
    script = run.submission(submission.tag).script.read_text()
    assert "#SBATCH --exclusive\n" in script and "#SBATCH --gres=gpu:2\n" in script


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("licenses=none-such", "slurm.options.licenses: 'none-such' is refused by slurm"),
        ("licences=scratch", "slurm.options.licences: 'scratch' is refused by slurm"),
        ("mem=999G", "slurm.options.mem: 1022976 MB of memory a node are needed"),
    ],
)
def test_a_refusal_names_the_key(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], change: str, words: str
) -> None:
    code = execute(
        [
            "launch",
            "--run",
            "small.toml",
            "--scheduler",
            "slurm",
            "--set",
            f"slurm.options.{change}",
        ]
    )
    assert (code, words in (said := capsys.readouterr().out)) == (2, True), said

"""The options of sbatch of a job on chosen nodes: the card's, without those that choose nodes, and
each GPU asked once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tr11ops.nodes.check import JobSettings, job_script
from tr11ops.runcard.sections import SlurmSection

PLAIN = SlurmSection(nodes=2, time_limit="20:00:00")
OPTIONS: dict[str, str | int | bool] = {
    "licenses": "scratch",
    "exclusive": True,
    "switches": 1,
    "gres": "gpu:a100:8",
    "mem": "900G",
}
CARD = PLAIN.model_copy(update={"reservation": "ours", "options": OPTIONS})


@pytest.mark.parametrize(("gpus", "gres"), [(8, ["gpu:a100:8"]), (4, ["gpu:a100:4"]), (0, [])])
def test_a_check_takes_the_cards_options(
    tmp_path: Path, gpus: int, gres: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = script(JobSettings(tmp_path, CARD, gpus), monkeypatch, tmp_path)
    assert [line for line in lines if "gres" in line] == [
        f"#SBATCH --gres={value}" for value in gres
    ]
    for option in ("--licenses=scratch", "--exclusive", "--mem=900G", "--reservation=ours"):
        assert f"#SBATCH {option}" in lines
    assert not any("switches" in line for line in lines)


def test_without_options_it_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = script(JobSettings(tmp_path, PLAIN, 8), monkeypatch, tmp_path)
    assert "#SBATCH --gres=gpu:8" in lines and not any("exclusive" in line for line in lines)


def script(settings: JobSettings, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    srun = folder / "srun"  # submitit looks whether there is one
    srun.write_text("")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return job_script(settings, ["n1", "n2"], 5).splitlines()

"""Which scheduler `auto` means on a machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tr11ops.cluster.select import choose_scheduler


@pytest.mark.parametrize(
    ("files", "surrounding_job", "expected"),
    [
        (("sbatch", "slurm.conf"), "", "slurm"),
        (("sbatch",), "", "local"),
        (("slurm.conf",), "", "local"),
        (
            ("sbatch", "slurm.conf"),
            "local",
            "local",
        ),  # a job of the embedded scheduler submits to that one
    ],
)
def test_auto_takes_slurm_only_where_it_can_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: tuple[str, ...],
    surrounding_job: str,
    expected: str,
) -> None:
    for name in files:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "state"))
    monkeypatch.setenv("TR11_SCHEDULER", surrounding_job)
    assert choose_scheduler("auto").name == expected
    assert choose_scheduler("local").name == "local"
    assert choose_scheduler("slurm").name == "slurm"


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="pbs"):
        choose_scheduler("pbs")  # type: ignore[arg-type]


def test_choosing_loads_no_scheduler_beforehand() -> None:
    program = (
        "import sys, tr11ops.cluster.select\n"
        "heavy = ('psutil', 'tr11ops.cluster.local', 'tr11ops.cluster.slurm')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.strip() == "[]"

"""Shipped files are found in a checkout and in an installed wheel, and their absence is said."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tr11ops
from tr11ops.base.shipped import read_shipped, shipped

PACKAGE = Path(tr11ops.__file__).parent


def test_in_a_checkout() -> None:
    assert shipped("slurm", "demo.toml").is_file()
    assert read_shipped("slurm", "train.sbatch.j2").startswith("#!/bin/bash\n")
    with pytest.raises(FileNotFoundError, match=r"slurm/none\.toml is not shipped"):
        shipped("slurm", "none.toml")


def test_in_a_wheel(tmp_path: Path) -> None:
    installed = tmp_path / "tr11ops"
    (installed / "shipped" / "slurm").mkdir(parents=True)
    (installed / "base").mkdir()
    for name in ("__init__.py", "base/__init__.py", "base/shipped.py"):
        shutil.copy(PACKAGE / name, installed / name)
    (installed / "shipped" / "slurm" / "x.toml").write_text("found")
    code = "from tr11ops.base.shipped import read_shipped; print(read_shipped('slurm', 'x.toml'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "found\n"

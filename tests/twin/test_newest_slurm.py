"""The newest Slurm that can be had: the contract of schedulers, and the twin with its faults, where the packages of a
newer release can be fetched. All of it on each version: `make slurm-versions`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SLURM_VERSION = Path(__file__).parents[2] / ".ci" / "slurm-version"
RELEASE = "forky"
UNAVAILABLE = 3
TESTS = ("tests/twin/test_faults.py", "tests/tr11ops/cluster/test_scheduler_contract.py")


@pytest.mark.skipif(
    shutil.which("apt-get") is None, reason="no apt-get to fetch another Slurm with"
)
def test_the_contract_and_the_faults_hold() -> None:
    version = subprocess.run(
        [SLURM_VERSION, RELEASE, "slurmctld", "-V"], capture_output=True, text=True, check=False
    )
    if version.returncode == UNAVAILABLE:
        pytest.skip(version.stderr.strip().splitlines()[-1])
    assert version.returncode == 0, version.stderr
    major = int(version.stdout.split()[1].split(".")[0])
    assert major >= 26, version.stdout
    done = subprocess.run(
        [SLURM_VERSION, RELEASE, sys.executable, "-m", "pytest", "-q", *TESTS],
        cwd=SLURM_VERSION.parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]

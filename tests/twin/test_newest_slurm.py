"""The newest Slurm that can be had: the contract of schedulers, the twin with its faults, and what only
newer ones offer, where the packages of a newer release can be fetched. All of it on each version:
`make slurm-versions`.
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
# each for itself, at one time: they wait for Slurm most of theirs
GROUPS = (
    ("tests/twin/test_faults.py",),
    ("tests/tr11ops/cluster/test_scheduler_contract.py", "tests/twin/test_expedited_twin.py"),
)
# what is the same without this Slurm: the embedded scheduler's part, hostile words
WITHOUT = "not local and not hostile and not survives"


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
    running = [
        subprocess.Popen(
            [SLURM_VERSION, RELEASE, sys.executable, "-m", "pytest", "-k", WITHOUT, *group],
            cwd=SLURM_VERSION.parents[1], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for group in GROUPS
    ]  # fmt: skip
    said = [process.communicate()[0] for process in running]
    for process, output in zip(running, said, strict=True):
        assert process.returncode == 0, output[-4000:]
        assert " passed" in output and "skipped" not in output, output[-4000:]

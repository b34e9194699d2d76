"""The real Slurm that tests share: one small twin for the whole session, started when the first
test asks for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import until
from tr11ops.base.errors import TwinError
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.twin.machine import find_programs, search_path, slurm_version
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

KEEPER = Path(__file__).with_name("twin_keeper.py")
SECONDS_TO_LEAVE = 30.0


def require_slurm() -> None:
    """Skip the test where Slurm is not installed; with TR11_REQUIRE_SLURM=1 fail instead."""
    try:
        find_programs(search_path(os.environ))
    except TwinError as error:
        if os.environ.get("TR11_REQUIRE_SLURM") == "1":
            pytest.fail(f"TR11_REQUIRE_SLURM=1, but {error}")
        pytest.skip(str(error))


def is_older_slurm(least: tuple[int, int]) -> bool:
    """Whether the Slurm of this machine is older; one that is not there has nothing to show either."""
    try:
        return slurm_version(find_programs(search_path(os.environ))["slurmctld"]) < least
    except TwinError:
        return True


def keep_twins(folder: Path, seconds: float) -> subprocess.Popen[str]:
    """Has the folder, and what runs of the twins in it, taken away once this process has ended, or
    the keeper is told a line: see `tests.plugins.twin_keeper`.
    """
    return subprocess.Popen(
        [sys.executable, "-IS", str(KEEPER), str(folder), str(seconds)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def twin_home() -> Iterator[Path]:
    """A folder for twins with a short path, which other users may enter."""
    folder = Path(tempfile.mkdtemp(prefix="tr11-"))
    folder.chmod(0o755)
    keeper = keep_twins(folder, SECONDS_TO_LEAVE)
    yield folder
    left, _ = keeper.communicate("\n")
    assert keeper.returncode == 0, f"left running by the twins of these tests:\n{left}"


@pytest.fixture(scope="session")
def twin(twin_home: Path) -> Iterator[Twin]:
    """A running Slurm of 6 nodes with 8 GPUs each (gpu_p5) and one node without (compil); use it,
    leave no job.
    """
    require_slurm()
    with Twin.up(TwinPlan(name="tests", nodes=6, gpus=8), twin_home) as running:
        yield running


@pytest.fixture
def slurm(twin: Twin) -> Iterator[SlurmScheduler]:
    """The scheduler edge to the shared twin; what a test leaves in the queue is ended before the
    next one begins.
    """
    scheduler = SlurmScheduler(twin.environment)
    yield scheduler
    clear_queue(scheduler)


def clear_queue(scheduler: SlurmScheduler) -> None:
    """Cancel all jobs, until none lives and every node that can be used is idle."""

    def is_cleared() -> bool:
        left = {job.array_id or job.raw_id for job in scheduler.jobs() if not job.state.is_final}
        for number in left:
            scheduler.cancel(number)
        return not left and all(
            "idle" in node.states or not node.is_usable for node in scheduler.nodes()
        )

    until(is_cleared, pause=0.2, context=lambda: [*scheduler.jobs(), *scheduler.nodes()])

"""What a session of tests has left of its twins is named and ended, also after a kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import keep_twins
from tests.waiting import is_gone, until


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "twins"
    (folder / "tests" / "munge").mkdir(parents=True)
    return folder


def test_a_daemon_that_is_left_is_named_and_ended(home: Path) -> None:
    environment = {**os.environ, "SLURM_CONF": f"{home}/tests/slurm.conf"}
    with subprocess.Popen(["sleep", "600"], env=environment) as daemon:
        until(lambda: f"{home}".encode() in Path(f"/proc/{daemon.pid}/environ").read_bytes())
        with keep_twins(home, 0.0) as keeper:
            said, _ = keeper.communicate("\n")
        assert (keeper.returncode, said) == (1, f"process {daemon.pid}: sleep 600\n")
        assert daemon.wait() == -signal.SIGKILL and not home.exists()


def test_a_session_that_left_nothing(home: Path) -> None:
    with keep_twins(home, 10.0) as keeper:
        said, _ = keeper.communicate("\n")
    assert (keeper.returncode, said) == (0, "") and not home.exists()


def test_a_killed_session_leaves_nothing(home: Path) -> None:
    code = (
        "import os, subprocess\n"
        "from pathlib import Path\n"
        "from tests.plugins.twin_fixture import keep_twins\n"
        f"home = {str(home)!r}\n"
        "kept = keep_twins(Path(home), 0.0)\n"
        "daemon = subprocess.Popen(['sleep', '600'], env={'SLURM_CONF': home + '/slurm.conf'}, close_fds=True)\n"
        "print(daemon.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    until(lambda: not home.exists(), "the end of what the killed session left")
    assert is_gone(int(done.stdout))

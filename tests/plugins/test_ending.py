"""An ordered end of the tests leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import until

ROOT = Path(__file__).parents[2]
CASE = """
import os, pathlib, signal, time
import pytest

HERE = pathlib.Path(__file__).parent

@pytest.fixture(scope="session")
def daemon():
    (HERE / "up").touch()
    yield
    (HERE / "down").touch()

def test_long(daemon):
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    (HERE / "trained").touch()
    time.sleep(600)
"""


def test_an_order_to_end_ends_what_fixtures_have_started(tmp_path: Path) -> None:
    """A process that a test forked ends by the signal itself, at once."""
    (tmp_path / "test_case.py").write_text(CASE)
    words = ["-p", "tests.plugins.ending", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, *words, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as tests:
        try:
            until(
                lambda: (tmp_path / "trained").exists() or tests.poll() is not None,
                "the test",
                seconds=60,
            )
            tests.send_signal(signal.SIGTERM)
            tests.wait(60)
        finally:
            tests.kill()
    assert (tmp_path / "trained").exists() and (tmp_path / "down").exists()

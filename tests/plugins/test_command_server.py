"""The tests' own tools: the command that stands for `tr11` is told from the real one by nothing but its
speed, and an ordered end leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.command_server import tr11_command
from tests.waiting import until

ROOT = Path(__file__).parents[2]
REAL = (sys.executable, "-c", "from tr11ops.cli.main import run; run()")


def typed(
    folder: Path, *words: str, command: tuple[str, ...] | None = None, **more: str
) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **more}
    done = subprocess.run(
        [*(command or tr11_command()), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words", [("--help",), ("runbook", "hung"), ("status", "--json"), ("lunch",), ("logs", "-f")]
)
def test_it_says_and_returns_what_the_real_one_does(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert typed(tmp_path, *words) == typed(tmp_path, *words, command=REAL)


def test_folder_and_environment_are_those_of_the_caller(tmp_path: Path) -> None:
    words = ("init", "--preset", "toy", "--yes", "--scheduler", "local", "--output", "mine.toml")
    card, seen = tmp_path / "mine.toml", []
    for command in (tr11_command(), REAL):
        assert typed(tmp_path, *words, command=command)[0] == 0
        seen.append((card.read_text(), card.stat().st_mode))
        card.unlink()
    assert seen[0] == seen[1]
    assert "no-such.toml" in typed(tmp_path, "status", TR11_RUN="no-such.toml")[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_it_ends_the_command(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log.txt"
    log.write_text(" iteration        1/ 10 | a line\n")
    caller = subprocess.Popen(
        [*tr11_command(), "logs", "-f", "--file", str(log)], stdout=subprocess.PIPE, text=True
    )
    assert caller.stdout is not None and "a line" in caller.stdout.readline()
    caller.send_signal(number)
    assert caller.wait(timeout=300) == -number
    assert caller.stdout.read() == "", "the pipe is closed: no one writes to it any more"


def test_it_ends_with_the_tests(tmp_path: Path) -> None:
    code = (
        "import subprocess; from tests.plugins.command_server import tr11_command\n"
        "print(subprocess.run([*tr11_command(), '--version'], capture_output=True, text=True).stdout)\n"
        "print(tr11_command()[-1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True,
        text=True, timeout=300, check=True,
    )  # fmt: skip
    version, *_, name = done.stdout.split("\n")[:-1]
    assert version.startswith("tr11 ")
    until(lambda: f"@{name}" not in Path("/proc/net/unix").read_text(), "the end of the server")


# ---------------------------------------------------------------------------
# An ordered end of the tests leaves nothing behind.


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

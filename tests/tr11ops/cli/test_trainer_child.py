"""A command whose work is done by a child, and an interrupt that comes before the child has loaded
what it needs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[3]
TR11 = "import sys; sys.path.insert(0, sys.argv.pop(1)); from tr11ops.cli.main import run; run()"
# Says that it has come so far, and goes on when the test lets it.
STOP_HERE = """
import os, pathlib, sys, time
if "-m" in sys.orig_argv:
    folder = pathlib.Path({folder!r})
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "pid").rename(folder / "here")
    while not (folder / "go").exists():
        time.sleep(0.01)
"""
COMMANDS = {
    "numpy": (
        ["data", "preprocess", "--input", "in.jsonl", "--tokenizer", "t", "--output-prefix", "out"],
        "stopped; no output is half-written\n",
    ),
    "torch": (["checkpoints", "inspect", "."], "tr11: stopped; nothing was left half-written\n"),
}


def is_pending(pid: Path) -> bool:
    """Whether an interrupt waits for the process to hear it."""
    status = Path("/proc", pid.read_text(), "status").read_text()
    (pending,) = (line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending, 16) & 1 << (signal.SIGINT - 1))


@pytest.mark.parametrize("place", ["interpreter", "library"])
@pytest.mark.parametrize("library", COMMANDS)
def test_an_interrupt_in_the_first_seconds_is_one_line(
    tmp_path: Path, library: str, place: str
) -> None:
    """While the child's interpreter starts, and while it loads its first large library."""
    shims = tmp_path / "shims"
    shims.mkdir()
    name = "sitecustomize.py" if place == "interpreter" else f"{library}.py"
    (shims / name).write_text(STOP_HERE.format(folder=str(tmp_path)) + "\nraise KeyError('the interrupt was not heard')\n"
                              * (place == "library"))  # fmt: skip
    words, said = COMMANDS[library]
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "t").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{shims}:{ROOT}"}
    parent = subprocess.Popen(
        [sys.executable, "-c", TR11, str(ROOT), *words], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until(lambda: (tmp_path / "here").exists() or parent.poll() is not None, "the child starts")
        parent.send_signal(signal.SIGINT)
        if place == "interpreter":
            until(
                lambda: is_pending(tmp_path / "here") or parent.poll() is not None,
                "the interrupt reaches the child",
            )
            (tmp_path / "go").touch()
        out, err = parent.communicate(timeout=300)
    finally:
        (tmp_path / "go").touch()
        parent.kill()
        parent.wait()
    assert (parent.returncode, out, err) == (1, "", said)

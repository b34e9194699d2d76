"""`tr11 track` as it is typed: once, again, live, and refused in one line."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.command_server import tr11_command
from tests.tr11ops.cli.status_place import TR11, Place
from tests.tr11ops.trackers.metrics_files import append, line
from tests.waiting import until

RUN = ("--run", "demo")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    append(made.directory.paths.metrics, [line(step, 1.0) for step in range(1, 6)])
    return made


def track(place: Place, *words: str) -> subprocess.CompletedProcess[str]:
    return place.typed([*tr11_command(), "track", *words, *RUN])


def cursor(place: Place) -> dict[str, Any]:
    path = place.directory.paths.state / "trackers" / "tensorboard.json"
    if not path.exists():
        return {"iteration": -1}
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def test_it_sends_what_is_new_and_says_how_to_look(place: Place) -> None:
    folder = place.directory.root / "trackers" / "tensorboard"
    done = track(place, "tensorboard")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"5 points sent to TensorBoard ({folder}), up to iteration 5\n"
        f"look: tensorboard --logdir {folder}\n"
    )
    append(place.directory.paths.metrics, [line(step, 1.0) for step in range(4, 9)])
    again = track(place, "tensorboard", "--json")
    assert json.loads(again.stdout) == {
        "schema": 1,
        "tracker": "tensorboard",
        "place": str(folder),
        "run": "main",
        "points": 5,
        "iteration": 8,
        "again": "replaced",
    }
    assert json.loads(track(place, "tensorboard", "--json").stdout)["points"] == 0


def test_it_follows_until_it_is_stopped(place: Place) -> None:
    words = [*TR11, "track", "tensorboard", "--follow", *RUN]
    child = subprocess.Popen(
        words,
        cwd=place.folder,
        env=place.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: cursor(place)["iteration"] == 5, "what was there")
        append(place.directory.paths.metrics, [line(step, 1.0) for step in range(6, 9)])
        until(lambda: cursor(place)["iteration"] == 8, "what came since")
        second = track(place, "tensorboard")
        assert (second.returncode, second.stdout) == (1, "")
        assert f"process {child.pid} " in second.stderr
        assert "is at it already" in second.stderr
        child.send_signal(signal.SIGTERM)
        out, errors = child.communicate(timeout=300)
    finally:
        child.kill()
        child.wait()
    assert (child.returncode, "8 points sent" in out) == (0, True), errors
    assert "Ctrl-C ends" in errors


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (("neptune",), 2, "TRACKER neptune: give one of tensorboard, mlflow, wandb, trackio"),
        (("tensorboard", "--to", "http://x"), 2, "takes a folder"),
        (("tensorboard", "--follow", "--json"), 2, "give one"),
    ],
)
def test_what_cannot_be_is_one_line(
    place: Place, words: tuple[str, ...], code: int, part: str
) -> None:
    done = track(place, *words)
    assert (done.returncode, done.stdout.startswith("{") or not done.stdout) == (code, True)
    assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_without_steps_is_told_in_one_line(place: Place) -> None:
    place.directory.paths.metrics.unlink()
    done = track(place, "tensorboard")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not there: the run has trained no step" in done.stderr
    assert len(done.stderr.splitlines()) == 1

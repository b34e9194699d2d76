"""A foreign card under tr11's own controller and node agents, two nodes: what becomes of a worker that is
killed, and of one that dies of being asked to stop.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tr11ops.trainers.kept import CARD, QUIET, SCRIPTS, wait_until
from tr11ops.cli.main import execute
from trainer.contract.attempt import EndMarker
from trainer.contract.metrics_record import records
from trainer.contract.paths import RunPaths

PROGRAM = "import sys; from tr11ops.cli.main import execute; sys.exit(execute(sys.argv[1:]))"
TRAIN = (sys.executable, "-c", PROGRAM, "train", "--run")


def test_a_killed_worker_is_blamed_and_the_launch_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, card = tmp_path / "run", tmp_path / "tr11.toml"
    script = SCRIPTS / "plain_train.py"
    card.write_text(CARD.format(root=root, script=script, python=sys.executable), encoding="utf-8")
    done = subprocess.run(
        [*TRAIN, str(card)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **QUIET},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (attempt,) = (root / "state" / "attempts").iterdir()
    end = EndMarker.read(attempt / "end.json")
    assert end is not None and (end.reason, end.iteration, end.launch) == ("finished", 20, 2)
    killed = json.loads((attempt / "launches" / "1.json").read_text(encoding="utf-8"))
    assert "rank 1 on" in json.dumps(killed) and "SIGKILL" in json.dumps(killed)
    steps = [one.iteration for one in records(RunPaths(root, "toy", "main").metrics) if one.is_step]
    assert steps == [*range(1, 9), *range(6, 21)]
    capsys.readouterr()
    execute(["status", "--run", str(card)])
    assert "20 / 20" in capsys.readouterr().out


def test_a_rank_that_dies_of_being_asked_to_stop_casts_no_suspicion(tmp_path: Path) -> None:
    """Its keeper waits for the last checkpoint for longer than the agents wait for a failed launch."""
    root, card = tmp_path / "run", tmp_path / "tr11.toml"
    text = CARD.format(root=root, script=SCRIPTS / "plain_train.py", python=sys.executable)
    text = text.replace('"20", "5", "0.1", "die-once-at-8"', '"2000", "5", "0.2", "falls"')
    text = text.replace("quiet = 1", 'quiet = 60\n[trainer.stop]\nhow = "signal TERM"')
    # by their keepers; the other test's are started by torchrun
    text = text.replace("command = [", f'start = "srun"\ncommand = ["{sys.executable}", ')
    card.write_text(
        text.replace("[trainer]\n", "[resilience]\nend_within_seconds = 4\n[trainer]\n")
    )
    process = subprocess.Popen(
        [*TRAIN, str(card)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **QUIET}
    )  # fmt: skip
    paths = RunPaths(root, "toy", "main")
    try:
        wait_until(lambda: [one for one in records(paths.metrics) if one.is_step][7:])
        assert execute(["kill", "--yes", "--reason", "a test", "--run", str(card)]) == 0
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    (attempt,) = (root / "state" / "attempts").iterdir()
    end = EndMarker.read(attempt / "end.json")
    assert end is not None, said.decode()[-3000:]
    assert (end.reason, end.restart, end.launch) == ("kill-switch", False, 1)
    assert end.iteration >= 8
    (launch,) = (attempt / "launches").glob("*.json")
    found = json.loads(launch.read_text(encoding="utf-8"))
    assert (found["cause"], found["blamed"], found["suspects"]) == ("operator", [], [])

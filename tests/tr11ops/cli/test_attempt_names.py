"""One way to name an attempt: what a person reads calls it ARRAY_TASK, as `squeue` does and as is
typed, and never by the number of its folder.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.excluding import exclude
from tests.tr11ops.observe.filling import fill
from tests.tr11ops.status_cases import NOW, record
from tr11ops.agent.batch import changes_since_last
from tr11ops.cli.main import execute
from tr11ops.rundir.attempts import LaunchRecord, launch_line
from tr11ops.rundir.kill_switch import other_ways
from tr11ops.rundir.paths import RunDirectory
from trainer.checkpoint.commands.inspect import describe
from trainer.contract.files import write_json
from trainer.contract.lease import LeaseClaim, LeaseFolder, living_claim, refusal
from trainer.contract.paths import RunPaths

NUMBER, LABEL = "987654", "1000_3"
LOCAL = ("--scheduler", "local")
DRY = ("--dry-run", *LOCAL)
SCREENS = (
    ("status", *LOCAL), ("list", ".", *LOCAL), ("handover", *DRY), ("handover", "--chronicle", "--since", "2000-01-01", *LOCAL),
    ("goodput",), ("report", "--no-charts", "-o", "-", *LOCAL), ("diagnose",), ("diagnose", "main_log.txt"), ("numbers",),
    ("logs",), ("logs", "--rank", "0"), ("logs", "--rank", "77"), ("logs", "--summary"), ("alerts", "digest"),
    ("nodes", "list", "--report", "-", *LOCAL), ("nodes", "history"), ("checkpoints", "list"),
    ("checkpoint-now", *DRY), ("kill", *DRY), ("pause", *DRY), ("resume", *DRY), ("rollback", "200", *DRY), ("pulse", *DRY),
    ("stacks", *LOCAL),
)  # fmt: skip


def directory_in(folder: Path) -> RunDirectory:
    root = folder / "demo-run"
    return RunDirectory(RunPaths(root, "demo", "main"), root / "kill-switch")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose newest attempt fails, holds the lease, has named a node, and has a damaged
    record.
    """
    directory = directory_in(tmp_path)
    paths, attempt = directory.paths, directory.paths.attempt(NUMBER)
    paths.root.mkdir()
    fill(directory)
    begun = {"array_id": "1000", "task_id": 3, "start": NOW - 400, "nodes": ["n01"]}
    changes = changes_since_last(paths, "1003", {**begun, "nodes": ["n02"]}, {})
    assert changes and changes[0].startswith("since attempt 1000_2: ")
    write_json(attempt / "attempt.json", {**begun, "changes": changes})
    rows = [
        {
            "kind": "step",
            **to_builtins(one),
            "time": NOW - 90 + one.iteration - 320,
            "job_id": NUMBER,
        }
        for one in (record(320), replace(record(321), learning_rate=1.0, consumed_samples=5))
    ]
    with paths.metrics.open("a") as metrics:
        metrics.write("".join(json.dumps(row) + "\n" for row in rows))
    LaunchRecord(1, ("n01",), NOW - 390, NOW - 20, summary="Xid 79", cause="node").write(attempt)
    (attempt / "launches" / "2.json").write_text('{"launch": [}')
    (attempt / "phases.jsonl").mkdir()
    (attempt / "end.json").write_text("not a marker")
    begins = launch_line(NUMBER, LABEL, 1, "1 node: n01") + "\n"
    error = "[default0]:RuntimeError: CUDA error: an illegal memory access was encountered\n"
    for log in (paths.main_log, tmp_path / "main_log.txt", attempt / "workers/n01/rank-0.log"):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(begins + error)
    exclude(directory, "n08", why="Xid 79", owner="tr11", days=14, job_id=NUMBER)
    claim = LeaseClaim(NUMBER, 1, "n01", 1, "ana", time.time(), "token", epoch=1)
    assert LeaseFolder(paths).claim(1, claim)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "scheduler"))
    monkeypatch.setenv("TR11_LOCAL_NODES", "8")
    yield tmp_path


def test_every_screen_calls_it_as_it_is_typed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = 0
    for words in SCREENS:
        capsys.readouterr()
        execute([*words, "--run", "demo"] if words[0] != "list" else list(words))
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        said = re.sub(r"\S*/\s*" + NUMBER, "FOLDER", out + err)
        assert NUMBER not in said, (words, said)
        named += LABEL in said
    assert named >= 12, named


def test_what_stops_a_run_by_hand_names_the_task_alone(folder: Path) -> None:
    """`scancel` of a task's own number ends the whole array where that number is the array's."""
    lines = other_ways(directory_in(folder), (NUMBER,), "tr11 pause", is_slurm=True)
    assert f"scancel {LABEL}   # ends it at once, unsaved" in lines
    assert [line for line in lines if NUMBER in line and not line.startswith("touch ")] == []


def test_a_checkpoint_was_written_by_a_task(folder: Path) -> None:
    place = directory_in(folder).paths.checkpoints / "global_step300"
    manifest = {"created": NOW, "job_id": NUMBER, "versions": {}, "run_card_hash": ""}
    told = describe(
        {
            "place": str(place), "files": [], "faults": [], "verified": "sizes", "step": 300, "optimizer_step": 300,
            "layout": "", "topology": {}, "cursor": {}, "random_state_ranks": 0, "manifest": manifest, "tensors": [], "model": {}, "remarks": [],
        }
    )  # fmt: skip
    assert f" by job {LABEL}\n" in told and NUMBER not in told


@pytest.mark.parametrize("words", [("stacks", *LOCAL), ("checkpoint-now", *DRY)])
def test_a_trainer_that_was_killed_does_not_train(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its claim on the lease stands as it left it: held, and old."""
    claim = directory_in(folder).paths.state / "lease" / "1.json"
    capsys.readouterr()
    execute([*words, "--run", "demo"])
    assert "is running" not in capsys.readouterr().err
    os.utime(claim, (time.time() - 60, time.time() - 60))
    assert execute([*words, "--run", "demo"]) == 1
    out, err = capsys.readouterr()
    assert "no attempt of this run is running" in err or "nothing of this run is training" in err
    assert "foreground" not in err and LABEL not in out


def test_a_save_may_be_asked_of_a_task_that_the_lease_alone_tells_of(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for name in (LABEL, NUMBER):
        assert execute(["checkpoint-now", "--job", name, *DRY, "--run", "demo"]) == 0
    capsys.readouterr()
    assert execute(["checkpoint-now", "--job", "1000_2", *DRY, "--run", "demo"]) == 1
    assert f"job 1000_2 trains no more, and {LABEL} was not asked" in capsys.readouterr().err


def test_a_newcomer_hears_which_task_keeps_it_out(folder: Path) -> None:
    paths = directory_in(folder).paths
    holder = living_claim(paths, time.time())
    assert holder is not None
    assert f"being trained by job {LABEL} (launch 1) of ana on n01" in refusal(holder, paths)

"""Nothing that a command waits for keeps it for ever: a scheduler that hangs, a file that does not
answer.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.watchdog.counting import slurm_commands
from tr11ops.alerts import service
from tr11ops.base import deadline
from tr11ops.runcard.card import load_card
from tr11ops.rundir.paths import RunDirectory

HANGS = "sleep 600 & wait"
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "deadlines.md"


def run_directory(bench: LocalBench) -> RunDirectory:
    card = load_card(bench.card, [], {})
    directory = RunDirectory(card.paths, card.kill_switch)
    directory.root.mkdir(exist_ok=True)
    return directory


@pytest.fixture
def frozen_scheduler(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> LocalBench:
    """Slurm's commands hang, as with a frozen slurmctld."""
    for name, value in slurm_commands(bench.folder, HANGS, HANGS).items():
        monkeypatch.setenv(name, value)
    for name in ("sbatch", "scancel"):
        (bench.folder / "tools" / name).write_text(f"#!/bin/sh\n{HANGS}\n")
        (bench.folder / "tools" / name).chmod(0o755)
    monkeypatch.setattr(deadline, "SCHEDULER_SECONDS", 0.4)
    return bench


def test_a_kill_sets_the_switch_though_the_scheduler_hangs(frozen_scheduler: LocalBench) -> None:
    directory, began = run_directory(frozen_scheduler), time.monotonic()
    killed = frozen_scheduler.tr11(
        "kill", "--run", str(frozen_scheduler.card), "--scheduler", "slurm", "--yes"
    )
    assert directory.kill_switch_is_set() and time.monotonic() - began < 120.0, (
        "and not the 600 s of the commands"
    )
    assert killed.code == 0 and "did not answer within 0.4 s" in killed.err
    assert "the switch works without it" in killed.err


def test_a_look_says_that_the_scheduler_is_silent(frozen_scheduler: LocalBench) -> None:
    run_directory(frozen_scheduler)
    seen = frozen_scheduler.tr11(
        "status", "--run", str(frozen_scheduler.card), "--scheduler", "slurm", "--json"
    )
    assert (seen.code, seen.json["verdict"]) == (3, "unknown")
    assert "squeue did not answer within 0.4 s" in seen.json["why"]


@pytest.fixture
def frozen_files(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBench]:
    """A file of the run directory does not answer, as one on a file server that is unreachable."""
    run_directory(bench)
    is_back = threading.Event()

    def read(path: Path, size: int) -> tuple[list[str], bool]:
        is_back.wait(600.0)
        return [], True

    monkeypatch.setattr("tr11ops.observe.files.tail_lines", read)
    for name in ("LOOK_SECONDS", "PASS_SECONDS", "STOP_SECONDS", "SCHEDULER_SECONDS"):
        monkeypatch.setattr(deadline, name, 2.0)
    yield bench
    is_back.set()


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("pulse", "--no-email"),
        ("handover", "--dry-run"),
        ("kill", "--yes"),
        ("pause", "--yes"),
    ],
    ids=" ".join,
)
def test_files_that_do_not_answer_end_a_command(
    frozen_files: LocalBench, words: tuple[str, ...]
) -> None:
    shown = frozen_files.tr11(*words, "--run", str(frozen_files.card), "--scheduler", "local")
    assert shown.code == 3, shown
    text = " ".join((shown.out + shown.err).split())
    assert re.search(
        r"within [24] s: a file system that it lies on, or the scheduler, does not answer", text
    ), text


def test_the_document_has_the_limits() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    limits = {
        "a question of a look or a stop to the scheduler": deadline.SCHEDULER_SECONDS,
        "one look": deadline.LOOK_SECONDS,
        "one pass of the watchdog": deadline.PASS_SECONDS,
        "a step of a stop in the run directory": deadline.STOP_SECONDS,
        "deliveries of one pass": service.DELIVERY_SECONDS,
    }
    rows = dict(re.findall(r"^\| ([^|]+?) \| (\d+) s \|", text, re.MULTILINE))
    assert {name: float(rows.get(name, "nan")) for name in limits} == limits
    total = deadline.SCHEDULER_SECONDS + 2 * deadline.STOP_SECONDS
    assert f"within {total:g} s" in text

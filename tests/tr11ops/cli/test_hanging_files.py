"""Every command that reads a run directory answers, with exit code 3, where its file system does
not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tr11ops.base import deadline
from tr11ops.cluster.pending_reasons import is_held
from tr11ops.rundir.hold_store import record_holds
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.requests import read_request

LIMIT = 0.3


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """What is called in place of a read that does not come back; it does when the test is over."""
    over = threading.Event()
    for name in ("LOOK_SECONDS", "STOP_SECONDS", "PASS_SECONDS"):
        monkeypatch.setattr(deadline, name, LIMIT)

    def hanging(*_: object, **__: object) -> None:
        over.wait()
        raise OSError("the test is over")

    yield hanging
    over.set()


def only_what_hangs_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other steps of a stop may take their time on a busy machine."""
    for name in ("LOOK_SECONDS", "PASS_SECONDS"):
        monkeypatch.setattr(deadline, name, 600.0)
    monkeypatch.setattr(deadline, "STOP_SECONDS", 5.0)


FIRST = [  # which never reach beyond the run directory's first answer
    "advise", "goodput", "report -o page.html", "launch --dry-run", "launch --repair --dry-run", "alerts list",
    "alerts ack --all", "alerts rota", "alerts digest", "backup plan", "backup status", "backup run --dry-run",
    "backup verify", "backup adopt store", "checkpoints list", "checkpoints pin 5", "nodes list",
    "nodes history", "status", "handover", "pulse", "kill", "pause", "resume",
]  # fmt: skip
WITHOUT_SCHEDULER = {"alerts", "backup", "checkpoints"}


def typed(bench: LocalBench, line: str) -> Any:
    words = line.split()
    more = [] if words[0] in WITHOUT_SCHEDULER or "history" in words else ["--scheduler", "local"]
    store = [] if words[0] != "backup" else ["--set", f'backup.store="{bench.folder / "store"}"']
    return bench.tr11(*words, "--run", str(bench.card), *more, *store)


@pytest.mark.parametrize("line", FIRST)
def test_a_run_directory_that_never_answers(
    bench: LocalBench, hang: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    run_directory(bench).root.mkdir()
    root, iterdir = run_directory(bench).root, Path.iterdir
    monkeypatch.setattr(RunDirectory, "exists", property(hang))
    monkeypatch.setattr(Path, "iterdir", lambda path: hang() if path == root else iterdir(path))
    answer = typed(bench, line)  # the hang has no end: that it answers is the proof
    assert answer.code == 3, (answer.out, answer.err)
    assert "does not answer" in answer.out + answer.err


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("advise", "tr11ops.cli.goodput.read_history"),
        ("report -o page.html", "tr11ops.cli.handover.gather"),
        ("launch --dry-run", "tr11ops.cli.launch.check_launch"),
        ("alerts list", "tr11ops.status.extra_observations.current_alert_state"),
        ("alerts digest", "tr11ops.cli.alerts.observe"),
        ("backup plan", "tr11ops.cli.backup_run.read_copies"),
        ("kill --dry-run", "tr11ops.cli.stopping.place_fault"),
        ("kill --dry-run", "tr11ops.cli.stop.read_request"),
        ("pause --dry-run", "tr11ops.cli.stop.read_request"),
        ("resume --dry-run", "tr11ops.cli.resume.read_request"),
    ],
)
def test_a_file_that_does_not_answer_later(
    bench: LocalBench,
    hang: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    read: str,
) -> None:
    run_directory(bench).root.mkdir()
    for name in ("LOOK_SECONDS", "STOP_SECONDS"):  # what comes before it may take its time
        monkeypatch.setattr(deadline, name, 5.0)
    monkeypatch.setattr(deadline, "STOP_SECONDS", LIMIT if "Request" in read else 1.0)
    monkeypatch.setattr(read, hang)
    answer = typed(bench, line)
    assert answer.code == 3 and "does not answer" in answer.err, (answer.out, answer.err)
    assert (
        not line.startswith(("kill", "pause", "resume"))
        or "stopped through the scheduler" in answer.err
    )


def test_a_switch_that_cannot_be_read_back_is_set(
    bench: LocalBench, hang: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made by another call than the one that hangs: the stop goes on without its own word."""
    run_directory(bench).root.mkdir()
    only_what_hangs_is_late(monkeypatch)
    switch = run_directory(bench).kill_switch
    monkeypatch.setattr(
        "tr11ops.cli.stop.read_request",
        lambda path, kind: hang() if switch.exists() else read_request(path, kind),
    )
    answer = bench.kill("--yes")
    assert answer.code == 0 and switch.exists() and f"kill switch set: {switch}" in answer.err


def test_queued_jobs_are_held_though_their_record_is_silent(
    bench: LocalBench, hang: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next task would start when the one that was stopped has left."""
    bench.block()
    only_what_hangs_is_late(monkeypatch)
    launched = bench.launch("--array", "1-3")
    assert launched.code == 0, (launched.out, launched.err)
    with monkeypatch.context() as patch:
        patch.setattr("tr11ops.queue.held_jobs.record_holds", hang)
        killed = bench.kill("--yes", "--json")
    assert killed.code == 0 and "cannot be recorded (not done within 5 s)" in killed.err, killed.err
    assert [job.job_id for job in bench.scheduler.jobs() if is_held(job)] == ["2_[1-3%1]"]
    assert (killed.json["action"], killed.json["held"]) == ("set", ["2"])
    record_holds(run_directory(bench), ["2"], "ana", "")
    with monkeypatch.context() as patch:
        patch.setattr("tr11ops.queue.held_jobs.forget_holds", hang)
        resumed = bench.tr11("resume", "--yes", "--run", str(bench.card), "--scheduler", "local")
    assert (
        resumed.code == 0
        and "released: job 2" in resumed.err
        and "it stays on record" in resumed.err
    )
    assert not any(is_held(job) for job in bench.scheduler.jobs())


def test_receipts_that_do_not_answer_end_no_stop(
    bench: LocalBench, hang: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_directory(bench).root.mkdir()
    only_what_hangs_is_late(monkeypatch)
    monkeypatch.setattr("tr11ops.cli.stop.acknowledgements", hang)
    answer = bench.kill("--yes", "--json")
    assert answer.code == 0 and (answer.json["action"], answer.json["receipts"]) == ("set", None)

"""`tr11 resume` while an attempt is leaving, which holds what is queued as one of the last things
that it does.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.cli.local_bench import NODES, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cli.typed_commands import held, tr11
from tests.twin.small_run import recorded_comment
from tr11ops.cluster.local import LocalScheduler
from tr11ops.queue.stop import leaving
from tr11ops.rundir.hold_store import record_holds
from trainer.contract.attempt import EndMarker, Heartbeat, write_heartbeat
from trainer.contract.files import write_json


@pytest.fixture
def queue(bench: LocalBench) -> tuple[str, str]:
    """A job whose trainer has ended for want of room while its controller is still at work, and one
    queued behind it.
    """
    directory = run_directory(bench)
    comment = recorded_comment(directory)
    number = bench.submit("exec sleep 600", NODES, "small", comment)
    bench.wait(lambda jobs: any(job.raw_id == number and job.state.is_active for job in jobs))
    write_heartbeat(
        directory.paths.heartbeat(0),
        Heartbeat(0, "here", 1, "training", 5, time.time() - 1, number),
    )
    marker = EndMarker(
        "error", 5, None, True, "No space left on device", time.time(), "here", number
    )
    path = directory.paths.end_marker(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, to_builtins(marker))
    return number, bench.submit("true", NODES, "small", comment)


def test_what_it_holds_as_its_last_step_is_released(
    bench: LocalBench, queue: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    number, behind = queue

    def hold_and_end(seconds: float) -> None:
        """What the attempt does while resume waits for its next look."""
        record_holds(run_directory(bench), [behind], "tr11", "it would meet the full disk too")
        bench.scheduler.hold(behind)
        bench.scheduler.cancel(number)
        bench.wait(lambda jobs: all(job.state.is_final for job in jobs if job.raw_id == number))

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=hold_and_end)
    monkeypatch.setattr("tr11ops.cli.resume.time", clock)
    answer = tr11(bench, "resume", "--yes")
    assert answer.code == 0 and f"job {number} is leaving" in answer.err, answer.err
    assert f"released: job {behind}" in answer.err and held(bench) == []


def test_one_that_does_not_leave_in_time_is_said_to_with_1(
    bench: LocalBench, queue: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    number, behind = queue
    record_holds(run_directory(bench), [behind], "ana", "pause")
    bench.scheduler.hold(behind)
    monkeypatch.setattr("tr11ops.cli.resume.LEAVING_SECONDS", 0.0)
    answer = tr11(bench, "resume", "--yes", "--json")
    assert answer.code == 1 and f"job {number} is still leaving" in answer.json["missing"], (
        answer.err
    )
    shown = tr11(bench, "resume", "--dry-run")
    assert shown.code == 0 and "is leaving; until" not in shown.err


def test_what_is_held_again_at_once_is_said_to_with_1(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.block()
    bench.launch("--array", "1-3")
    tr11(bench, "pause", "--yes")
    release = LocalScheduler.release

    def release_and_lose(self: LocalScheduler, job_id: str) -> None:
        release(self, job_id)
        self.hold(job_id)

    monkeypatch.setattr(LocalScheduler, "release", release_and_lose)
    answer = tr11(bench, "resume", "--yes", "--json")
    assert answer.code == 1 and "job 2 is held again" in answer.json["missing"], answer.err


def test_a_trainer_that_lives_again_is_not_leaving(
    bench: LocalBench, queue: tuple[str, str]
) -> None:
    """A controller starts its workers anew in the same allocation; the marker of the last launch
    stays.
    """
    number, _ = queue
    directory = run_directory(bench)
    jobs = [job for job in bench.living() if job.raw_id == number]
    assert leaving(directory, jobs) == (number,)
    beat = Heartbeat(0, "here", 1, "ended", 5, time.time() + 1, number)
    write_heartbeat(directory.paths.heartbeat(0), beat)
    assert leaving(directory, jobs) == (number,)
    write_heartbeat(directory.paths.heartbeat(0), replace(beat, phase="loading"))
    assert leaving(directory, jobs) == ()

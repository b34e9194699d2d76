"""Ages are judged by the run's clock: this machine's, and a node's, may be an hour wrong in either
direction. An attempt without an end marker ended when whoever said it has, else at its last sign of
life; never at its start.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.job_queue import Queue
from tests.tr11ops.status_cases import NOW, record, running, steps
from tr11ops.base.errors import SchedulerUnreachable
from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import iso_time
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.detect.detector import Severity
from tr11ops.detect.registry import detect_all
from tr11ops.detect.unfinished_end import identity_of_end, unfinished_end
from tr11ops.goodput.history import read_attempts as read_history
from tr11ops.observe.clock import moment_of, skews
from tr11ops.observe.look import look_now, observe
from tr11ops.observe.observations import ClockReading
from tr11ops.observe.snapshot import Attempt, RunFacts, Snapshot, newest_attempt
from tr11ops.rundir.attempts import AttemptVerdict
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory, new_tag
from tr11ops.status.assessment import status_of
from tr11ops.watchdog.verdict import Verdict, VerdictWord, judge
from trainer.contract.attempt import EndMarker, Heartbeat, write_heartbeat
from trainer.contract.files import file_system_time, write_json
from trainer.contract.paths import RunPaths

HOUR = 3600.0
PACE = 2.0


TAG = "20220501-120000-00000000"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    root = tmp_path / "run"
    root.mkdir()
    return RunDirectory(RunPaths(root, "tr11-176B-ml", "main"), root / "kill-switch")


class TimedQueue(Queue):
    """With 48 nodes, and with a clock where it is given one."""

    def __init__(self, *jobs: Job, ahead: float | None = None) -> None:
        super().__init__(*jobs)
        self._ahead = ahead

    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(f"n{number:02d}", frozenset({"allocated"})) for number in range(1, 49))

    def clock(self) -> float:
        if self._ahead is None:
            raise SchedulerUnreachable("it is silent")
        return time.time() + self._ahead


def train(directory: RunDirectory, silent: float = 0.0, node_ahead: float = 0.0) -> TimedQueue:
    """A run that has trained until `silent` seconds ago, on nodes whose clocks are `node_ahead`."""
    paths, last = directory.paths, time.time() - silent
    paths.metrics.parent.mkdir(parents=True)
    lines = []
    for number in range(60):
        step = to_builtins(record(1000 + number, seconds_per_iteration=PACE))
        lines.append(
            f'{{"kind": "step", "time": {last + node_ahead - PACE * (59 - number)}, "job_id": "1007", '
            + ", ".join(f'"{key}": {value}' for key, value in step.items())
            + "}"
        )
    paths.metrics.write_text("\n".join(lines) + "\n")
    os.utime(paths.metrics, (last, last))
    for rank in range(4):
        beat = Heartbeat(
            rank, f"n{rank + 1:02d}", 100 + rank, "training", 1059, last + node_ahead, "1007"
        )
        write_heartbeat(paths.heartbeat(rank), beat)
        os.utime(paths.heartbeat(rank), (last, last))
    directory.submission(TAG).folder.mkdir(parents=True)
    return TimedQueue(running(comment=directory.comment(TAG), start_time=time.time() - HOUR))


def judged(
    directory: RunDirectory, queue: TimedQueue, here: float = 0.0
) -> tuple[Snapshot, Verdict, list[str]]:
    """A look on a machine whose clock is `here` seconds ahead."""
    facts = RunFacts("tr11-176B-ml", "main", directory.root, directory.kill_switch, nodes=48)
    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + here)
        moment = look_now(directory, facts, queue)
    seen = observe(directory, facts, queue, moment)
    findings = detect_all(seen)
    assert (
        all(finding.severity < Severity.CRITICAL for finding in findings)
        or judge(seen, findings).exit_code
    )
    return (
        seen,
        judge(seen, findings),
        [finding.title for finding in findings if finding.detector == "clock-skew"],
    )


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (
            HOUR + 20.0,
            [
                "this machine's clock is 1 h 00 min ahead of the run's: ages are shown by the run's clock"
            ],
        ),
        (
            -HOUR - 20.0,
            [
                "this machine's clock is 1 h 00 min behind the run's: ages are shown by the run's clock"
            ],
        ),
        (5.0, []),
    ],
)
def test_a_healthy_run_is_healthy_by_every_clock(
    directory: RunDirectory, ahead: float, said: list[str]
) -> None:
    queue = train(directory)
    _, verdict, found = judged(directory, queue, ahead)
    assert (verdict.word, verdict.exit_code) == (VerdictWord.HEALTHY, 0), verdict.why
    assert found == said


@pytest.mark.parametrize("ahead", [HOUR, -HOUR, 0.0])
def test_a_run_that_hangs_hangs_by_every_clock(directory: RunDirectory, ahead: float) -> None:
    queue = train(directory, silent=2 * HOUR + 20.0)
    seen, verdict, _ = judged(directory, queue, ahead)
    assert (verdict.word, verdict.exit_code) == (VerdictWord.STALLED, 1)
    assert "2 h 00 min" in verdict.why and abs(seen.time - time.time()) < 60.0


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_nodes_whose_clocks_are_wrong(directory: RunDirectory, ahead: float) -> None:
    _, verdict, found = judged(directory, train(directory, node_ahead=ahead), 0.0)
    assert (verdict.word, verdict.exit_code) == (VerdictWord.HEALTHY, 0), verdict.why
    assert len(found) == 4 and all("clock of n0" in title for title in found)


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_nodes_whose_clocks_are_wrong_do_not_hide_silence(
    directory: RunDirectory, ahead: float
) -> None:
    _, verdict, _ = judged(directory, train(directory, silent=2 * HOUR, node_ahead=ahead), 0.0)
    assert (verdict.word, verdict.exit_code) == (VerdictWord.STALLED, 1)


def test_a_copied_directory_is_no_living_one(directory: RunDirectory) -> None:
    train(directory, silent=3 * HOUR)
    for path in (directory.paths.metrics, *directory.paths.heartbeats.iterdir()):
        os.utime(path)  # as a copy leaves it
    over = TimedQueue(running(state=JobState.COMPLETED, end_time=time.time() - 2 * HOUR))
    assert judged(directory, over, 0.0)[1].word is VerdictWord.DOWN


# ------------------------------------------------------------------------- what it is compared with
def test_nothing_is_left_behind(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    before, stamped = file_system_time(directory.root)
    assert abs(before - stamped) < 5.0 and not list(directory.root.iterdir())
    opened = os.open

    def without_nameless_files(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported", str(path))
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", without_nameless_files)
    before, stamped = file_system_time(directory.root)
    assert abs(before - stamped) < 5.0 and not list(directory.root.iterdir())


def test_where_nothing_may_be_written_the_scheduler_is_asked(directory: RunDirectory) -> None:
    now = time.time()
    directory.paths.main_log.parent.mkdir(parents=True)
    directory.paths.main_log.touch()
    # and there is no state folder
    os.utime(directory.paths.main_log, (now - 2 * HOUR, now - 2 * HOUR))
    told = moment_of(directory, 30.0, TimedQueue(ahead=-HOUR))
    assert told.against == "the scheduler's" and told.ahead == pytest.approx(HOUR, abs=5)
    silent = moment_of(directory, 30.0, TimedQueue())
    assert abs(silent.time - now) < 60.0 and isinstance(silent.ahead, Unknown)
    assert moment_of(directory, 30.0, TimedQueue(ahead=1.0)).ahead == 0.0
    directory.paths.main_log.unlink()
    assert moment_of(directory, 30.0, TimedQueue(ahead=-HOUR)).ahead == 0.0, "nothing has an age"


def test_a_host_is_judged_by_its_best_file() -> None:
    slow = ClockReading("n01", 100.0, 160.0, "a")
    assert skews([slow, ClockReading("n01", 200.0, 200.1, "b")], 30.0) == {}
    assert skews([slow], 30.0) == {"n01": -60.0}


START, LAST = NOW - 7200.0, NOW - 600.0  # it trained for nearly two hours


@pytest.fixture
def trained(tmp_path: Path) -> RunDirectory:
    """A run of which one attempt, 1007, has trained and left no word."""
    paths = RunPaths(tmp_path / "run", "tr11-176B-ml", "main")
    folder = paths.attempt("1007")
    write_json(
        folder / "attempt.json",
        {"job_id": "1007", "start": START, "nodes": ["n01", "n02"], "kind": "slurm"},
    )
    log = folder / "workers" / "n01" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("training ...\n")
    os.utime(log, (LAST, LAST))
    for place in (folder / "workers", folder):  # a folder's own time is that of its begin
        os.utime(place, (START, START))
    return RunDirectory(paths, paths.root / "kill-switch")


def seen(trained: RunDirectory, *jobs: Job) -> Attempt:
    facts = RunFacts("tr11-176B-ml", "main", trained.root, trained.kill_switch)
    snapshot = observe(trained, facts, Queue(*jobs), NOW)
    [attempt] = known(snapshot.attempts, ())
    [shown] = status_of(snapshot, (), judge(snapshot, ())).document()["last_attempts"]
    assert (shown["changed"], shown["is_told"]) == (iso_time(attempt.changed), attempt.is_told)
    return attempt


def test_it_is_dated_by_what_its_workers_wrote_last(trained: RunDirectory) -> None:
    attempt = seen(trained)
    assert (attempt.changed, attempt.is_told) == (LAST, False)
    assert attempt.ended.ago(NOW) == "last word 10 min ago"


def test_a_heartbeat_or_a_step_may_be_later(trained: RunDirectory) -> None:
    write_heartbeat(
        trained.paths.heartbeat(3), Heartbeat(3, "n02", 1, "training", 8, LAST + 20, "1007")
    )
    write_heartbeat(
        trained.paths.heartbeat(4), Heartbeat(4, "n02", 1, "training", 8, LAST + 90, "1008")
    )
    assert seen(trained).changed == LAST + 20
    trained.paths.metrics.parent.mkdir(parents=True)
    step = steps(count=1, job_id="1007", age=NOW - LAST - 50)[0]
    row = {**to_builtins(step.record), "time": LAST + 50, "job_id": "1007"}
    trained.paths.metrics.write_text(json.dumps(row) + "\n")
    assert seen(trained).changed == LAST + 50


def test_whoever_said_when_it_ended_is_believed(trained: RunDirectory) -> None:
    over = running(
        state=JobState.CANCELLED, end_time=LAST + 200, comment=trained.comment(new_tag())
    )
    attempt = seen(trained, over)
    assert (attempt.changed, attempt.ended.ago(NOW)) == (LAST + 200, "6 min 40 s ago")
    AttemptVerdict("error", 8, 5, 1, "a node was lost", time=LAST + 5, job_id="1007").write(
        trained.paths.attempt("1007")
    )
    assert (seen(trained).changed, seen(trained, over).changed) == (LAST + 5, LAST + 200)


def test_an_end_is_told_from_others_without_the_records_of_its_launches(
    trained: RunDirectory,
) -> None:
    """Those of the newest attempts alone are looked into."""
    verdict = AttemptVerdict(
        "error", 8, 5, 1, "SIGSEGV", cause="node", fault="died: sigsegv at 1", time=LAST
    )
    verdict.write(trained.paths.attempt("1007"))
    assert identity_of_end(seen(trained), None) == ("died: sigsegv",)
    replace(verdict, blamed=("n02",)).write(trained.paths.attempt("1007"))
    assert identity_of_end(seen(trained), None) == ("node", "died: sigsegv at 1")


def test_one_that_lives_has_its_last_sign(trained: RunDirectory) -> None:
    write_heartbeat(
        trained.paths.heartbeat(0), Heartbeat(0, "n01", 1, "training", 8, NOW - 3, "1007")
    )
    attempt = seen(trained, running(comment=trained.comment(new_tag())))
    assert (attempt.changed, attempt.is_told) == (NOW - 3, False)


def test_alerts_and_accounts_date_it_alike(trained: RunDirectory) -> None:
    facts = RunFacts("tr11-176B-ml", "main", trained.root, trained.kill_switch)
    [finding] = unfinished_end.detect(observe(trained, facts, Queue(), NOW))
    [attempt] = read_history(trained, (), {}, [], read_journal(trained.journal))
    assert (finding.since, attempt.last_sign, attempt.ended) == (LAST, LAST, None)


def test_the_newest_attempt_is_the_one_that_began_last() -> None:
    """The end of the one before may be told when it has begun: the next task ends a job that lost
    its batch host.
    """
    before = Attempt("1006", NOW - 5, end=None, start=START)
    after = Attempt("1007", NOW - 20, end=None, start=NOW - 20)
    ended = Attempt(
        "1005", NOW - 8000, end=EndMarker("error", 1, 1, True, "", NOW - 8000, "n01", "1005")
    )
    assert newest_attempt((before, after, ended)) == after
    assert to_builtins(before.ended) == {"time": NOW - 5, "is_told": True}

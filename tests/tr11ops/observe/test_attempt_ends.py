"""When an attempt without an end marker ended: by whoever said it, else by its last sign of life;
never by its start.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.status_cases import NOW, running, steps
from tr11ops.base.observed import known
from tr11ops.base.units import iso_time
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.detect.unfinished_end import identity_of_end, unfinished_end
from tr11ops.goodput.history import read_attempts as read_history
from tr11ops.observe.look import observe
from tr11ops.observe.snapshot import Attempt, RunFacts, newest_attempt
from tr11ops.rundir.attempts import AttemptVerdict
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory, new_tag
from tr11ops.status.assessment import status_of
from tr11ops.watchdog.verdict import judge
from trainer.contract.end_marker import EndMarker
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths
from trainer.contract.phases import Heartbeat, write_heartbeat
from trainer.contract.record import Record

START, LAST = NOW - 7200.0, NOW - 600.0  # it trained for nearly two hours


class Queue(Record):
    """A scheduler that knows these jobs."""

    listed: tuple[Job, ...] = ()
    name: str = "slurm"

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        return self.listed

    def nodes(self) -> tuple[Node, ...]:
        return ()


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
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


def seen(directory: RunDirectory, *jobs: Job) -> Attempt:
    facts = RunFacts("tr11-176B-ml", "main", directory.root, directory.kill_switch)
    snapshot = observe(directory, facts, Queue(jobs), NOW)
    [attempt] = known(snapshot.attempts, ())
    [shown] = status_of(snapshot, (), judge(snapshot, ())).document()["last_attempts"]
    assert (shown["changed"], shown["is_told"]) == (iso_time(attempt.changed), attempt.is_told)
    return attempt


def test_it_is_dated_by_what_its_workers_wrote_last(directory: RunDirectory) -> None:
    attempt = seen(directory)
    assert (attempt.changed, attempt.is_told) == (LAST, False)
    assert attempt.ended.ago(NOW) == "last word 10 min ago"


def test_a_heartbeat_or_a_step_may_be_later(directory: RunDirectory) -> None:
    write_heartbeat(
        directory.paths.heartbeat(3), Heartbeat(3, "n02", 1, "training", 8, LAST + 20, "1007")
    )
    write_heartbeat(
        directory.paths.heartbeat(4), Heartbeat(4, "n02", 1, "training", 8, LAST + 90, "1008")
    )
    assert seen(directory).changed == LAST + 20
    directory.paths.metrics.parent.mkdir(parents=True)
    step = steps(count=1, job_id="1007", age=NOW - LAST - 50)[0]
    row = {**to_builtins(step.record), "time": LAST + 50, "job_id": "1007"}
    directory.paths.metrics.write_text(json.dumps(row) + "\n")
    assert seen(directory).changed == LAST + 50


def test_whoever_said_when_it_ended_is_believed(directory: RunDirectory) -> None:
    over = running(
        state=JobState.CANCELLED, end_time=LAST + 200, comment=directory.comment(new_tag())
    )
    attempt = seen(directory, over)
    assert (attempt.changed, attempt.ended.ago(NOW)) == (LAST + 200, "6 min 40 s ago")
    AttemptVerdict("error", 8, 5, 1, "a node was lost", time=LAST + 5, job_id="1007").write(
        directory.paths.attempt("1007")
    )
    assert (seen(directory).changed, seen(directory, over).changed) == (LAST + 5, LAST + 200)


def test_an_end_is_told_from_others_without_the_records_of_its_launches(
    directory: RunDirectory,
) -> None:
    """Those of the newest attempts alone are looked into."""
    verdict = AttemptVerdict(
        "error", 8, 5, 1, "SIGSEGV", cause="node", fault="died: sigsegv at 1", time=LAST
    )
    verdict.write(directory.paths.attempt("1007"))
    assert identity_of_end(seen(directory), None) == ("died: sigsegv",)
    replace(verdict, blamed=("n02",)).write(directory.paths.attempt("1007"))
    assert identity_of_end(seen(directory), None) == ("node", "died: sigsegv at 1")


def test_one_that_lives_has_its_last_sign(directory: RunDirectory) -> None:
    write_heartbeat(
        directory.paths.heartbeat(0), Heartbeat(0, "n01", 1, "training", 8, NOW - 3, "1007")
    )
    attempt = seen(directory, running(comment=directory.comment(new_tag())))
    assert (attempt.changed, attempt.is_told) == (NOW - 3, False)


def test_alerts_and_accounts_date_it_alike(directory: RunDirectory) -> None:
    facts = RunFacts("tr11-176B-ml", "main", directory.root, directory.kill_switch)
    [finding] = unfinished_end.detect(observe(directory, facts, Queue(), NOW))
    [attempt] = read_history(directory, (), {}, [], read_journal(directory.journal))
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

"""From a run directory and a scheduler to a snapshot: what is read, whose jobs count, and what
blindness looks like.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.observe.filling import fill, submission
from tests.tr11ops.status_cases import (
    DAY,
    NOW,
    ended,
    facts_with,
    pending,
    running,
    save_checkpoint,
    save_marker,
)
from tests.waiting import until
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import Unknown, known
from tr11ops.cluster.base import BatchRequest, Job, JobState, Node
from tr11ops.cluster.local import LocalScheduler
from tr11ops.cluster.select import AskedAhead
from tr11ops.detect.nodes_left import spare_nodes
from tr11ops.detect.registry import detect_all
from tr11ops.observe.derived import task_seconds
from tr11ops.observe.files import read_kill_switch
from tr11ops.observe.look import observe
from tr11ops.observe.snapshot import Attempt, KillSwitch, RunFacts, Snapshot
from tr11ops.runcard.exit_duration import ExitPlan
from tr11ops.rundir.attempts import LaunchRecord
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory, Submission, new_tag
from tr11ops.watchdog.verdict import VerdictWord, judge
from trainer.contract.attempt import EndMarker, ExitTime, Heartbeat, write_heartbeat
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths


@dataclass
class Answers:
    """The questions of the protocol that observing asks, with fixed answers; counts the calls."""

    job_list: tuple[Job, ...] = ()
    failure: Exception | None = None
    name: str = "slurm"
    calls: list[str] = field(default_factory=list)

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        self.calls.append("jobs")
        if self.failure is not None:
            raise self.failure
        return tuple(job for job in self.job_list if name in (None, job.name))

    def nodes(self) -> tuple[Node, ...]:
        self.calls.append("nodes")
        return (Node("n01", frozenset({"idle"}), partitions=("gpu",)),)

    def job(self, job_id: str) -> Job | None:
        return None


@dataclass
class Records(Answers):
    """Answers whose table has no excluded nodes, as squeue's: the record of one job has them."""

    excluded: tuple[str, ...] = ()

    def job(self, job_id: str) -> Job | None:
        self.calls.append(f"job {job_id}")
        if self.failure is not None:
            raise self.failure
        return pending(job_id=job_id, excluded=self.excluded)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    root = tmp_path / "run"
    root.mkdir()
    return RunDirectory(RunPaths(root, "tr11-176B-ml", "main"), root / "kill-switch")


def facts(directory: RunDirectory) -> RunFacts:
    return RunFacts(
        "tr11-176B-ml",
        "main",
        directory.root,
        directory.kill_switch,
        nodes=48,
        checkpoint_interval=100,
    )


def look(directory: RunDirectory, scheduler: object, now: float = NOW):  # type: ignore[no-untyped-def]
    return observe(directory, facts(directory), scheduler, now)  # type: ignore[arg-type]


def test_a_whole_run_directory(directory: RunDirectory) -> None:
    tag = fill(directory).tag
    scheduler = Answers(
        (
            running(job_id="1000_2", raw_id="1002", comment=directory.comment(tag)),
            pending((3, 4), comment=directory.comment(tag), excluded=("n08",)),
        )
    )
    seen = look(directory, scheduler)
    assert scheduler.calls == ["jobs", "nodes"]
    assert seen.unknowns() == ()
    assert [step.record.iteration for step in seen.steps] == list(range(310, 320))
    assert [beat.rank for beat in seen.heartbeats] == [0, 1, 2, 3]
    by_id = {attempt.job_id: attempt for attempt in seen.attempts}
    assert by_id["1001"].end.reason == "exit-duration"
    assert (by_id["1002"].end, by_id["1002"].label, by_id["1002"].nodes) == (
        None,
        "1000_2",
        ("n01",),
    )
    assert seen.checkpoints.steps == (100, 200, 300)
    assert [entry.step for entry in seen.checkpoints.examined] == [300], (
        "older ones are not touched"
    )
    assert seen.checkpoints.newest_sound.verified == "sizes"
    assert [(entry.node, entry.why) for entry in seen.exclusions] == [
        ("n07", "Xid 79"),
        ("n08", "excluded by job 1000_[3-4%1]"),
    ]
    assert seen.kill_switch is None
    assert judge(seen, detect_all(seen)).word is VerdictWord.HEALTHY


def test_a_running_attempt_goes_by_the_card_that_it_was_launched_with(
    directory: RunDirectory,
) -> None:
    """The card's file may be another one by now: it says what the next attempt will do."""
    own = {
        "checkpoint": {"interval": 500, "interval_minutes": 30},
        "logging": {"interval": 5},
        "slurm": {"nodes": 40},
    }
    held = tuple(f"n{number:02d}" for number in range(1, 51))
    job = running(
        job_id="1000_2", raw_id="1002", comment=directory.comment(fill(directory).tag), nodes=held
    )
    path = directory.paths.attempt("1002") / "card.json"
    for written, expected in (
        (own, (500, 30, 5, 40, 48)),
        ({**own, "checkpoint": {"interval": "often"}, "slurm": []}, (100, None, 5, None, 48)),
        (None, (100, None, 1, None, 48)),
    ):
        path.unlink(missing_ok=True)
        if written is not None:
            write_json(path, written)
        seen = look(directory, Answers((job,)))
        run = seen.run
        found = (
            run.checkpoint_interval,
            run.checkpoint_minutes,
            run.log_interval,
            run.trains_on,
        )
        assert (*found, run.nodes) == expected
        assert spare_nodes(seen) == (9 if written is own else 1, True), "n07 is excluded"
    write_json(path, own)
    often = LaunchRecord(2, held, 1.0, save_minutes=12.5)  # the newest launch decided so
    often.write(path.parent)
    assert look(directory, Answers((job,))).run.checkpoint_minutes == 12.5
    assert look(directory, Answers()).run.checkpoint_interval == 100, "nothing runs"


def test_each_job_ends_by_the_card_that_it_was_launched_with_and_by_its_limit_now(
    directory: RunDirectory,
) -> None:
    """The card says 100 h and leaves after 60 h now; it said 20 h, and an hour less of the limit."""
    first, second = fill(directory), submission(directory, "2000")
    own = {
        "run": {"exit_duration_minutes": 19 * 60},
        "slurm": {"time_limit": "20:00:00"},
        "derived": {"exit_duration_is_derived": True},
    }
    write_json(directory.paths.attempt("1002") / "card.json", own)
    write_json(directory.submission(first.tag).card, own)
    fixed = {"run": {"exit_duration_minutes": 600}, "slurm": {"time_limit": "20:00:00"}}
    write_json(directory.submission(second.tag).card, fixed)
    times = {"comment": directory.comment(first.tag), "time_limit_seconds": 20 * 3600}
    job = running(job_id="1000_2", raw_id="1002", **times)
    shortened = replace(job, time_limit_seconds=10 * 3600)
    queued = pending((3, 4), **times)
    other = pending(
        (),
        job_id="2000",
        raw_id="2000",
        array_id=None,
        **{**times, "comment": directory.comment(second.tag)},
    )
    foreign = replace(queued, comment="")

    def seen(job: Job) -> Snapshot:
        now = facts_with(facts(directory), exit_plan=ExitPlan(3600.0, limit=100 * 3600.0))
        return observe(directory, now, Answers((job,)), NOW)  # type: ignore[arg-type]

    def hours(job: Job) -> float | None:
        found = task_seconds(seen(job), job)
        return None if found is None else found / 3600

    assert [hours(one) for one in (job, shortened, queued, other)] == [19, 9, 19, 10]
    assert hours(foreign) == 20, (
        "no card is known to be its own: the present one's, within its limit"
    )
    told = directory.paths.exit_time("1002")
    ExitTime(job.start_time + 17 * 3600, "by measured saves").write(told)
    assert hours(job) == 17, "its agent knows what a save takes"
    ExitTime(job.start_time + 30 * 3600).write(told)
    assert hours(job) == 20, "the scheduler ends it before"
    told.write_text("{")
    assert hours(job) == 19

    def changed_limits(job: Job) -> list[str]:
        every = detect_all(seen(job))
        return [one.subject for one in every if one.detector == "limit-changed"]

    assert changed_limits(job) == [], "the card was edited since, the job's limit was not"
    assert changed_limits(shortened) == ["1000_2"]


def test_an_empty_run_directory_is_down_a_missing_one_unknown(directory: RunDirectory) -> None:
    seen = look(directory, Answers())
    assert (seen.steps, seen.heartbeats, seen.attempts, seen.kill_switch, seen.submissions) == (
        (),
        (),
        (),
        None,
        (),
    )
    assert judge(seen, detect_all(seen)).word is VerdictWord.DOWN
    directory.root.rmdir()
    gone = look(directory, Answers())
    assert isinstance(gone.steps, Unknown)
    verdict = judge(gone, detect_all(gone))
    assert (verdict.word, verdict.exit_code) == (VerdictWord.UNKNOWN, 3)
    assert "not mounted" in verdict.why
    assert len(gone.unknowns()) == 1, "one cause is told once"
    for name in ("ended jobs", "resubmitted", "switch fault"):
        assert name in gone.unknowns()[0]


def test_nodes_that_were_let_in_again_are_seen_as_far_back_as_a_blame_goes(
    directory: RunDirectory,
) -> None:
    directory.paths.root.mkdir(parents=True, exist_ok=True)
    for node, age in (("n2", 60.0), ("n3", 3 * DAY)):
        Journal(directory.journal).write(
            "node-included", "mended", {"node": node}, "ana", when=NOW - age
        )
    names = [one.node for one in known(look(directory, Answers()).readmissions, ())]
    assert names == ["n2"]
    attempt = directory.paths.attempt("1007")
    (attempt / "launches").mkdir(parents=True)
    write_json(
        attempt / "launches" / "1.json",
        {
            "launch": 1,
            "start": NOW - 5 * DAY,
            "nodes": ["n3"],
            "end": NOW - 4 * DAY,
            "blamed": ["n3"],
            "summary": "Xid",
        },
    )
    names = [one.node for one in known(look(directory, Answers()).readmissions, ())]
    assert names == ["n3", "n2"]


@pytest.mark.parametrize(
    ("failure", "part"),
    [
        (SchedulerUnreachable("squeue did not answer within 10 s"), "did not answer within 10 s"),
        (SchedulerError("Invalid user"), "answered with an error: Invalid user"),
        (OSError(24, "Too many open files"), "Too many open files"),
    ],
)
def test_a_silent_scheduler_is_asked_once_and_is_unknown(
    directory: RunDirectory, failure: Exception, part: str
) -> None:
    fill(directory)
    scheduler = Answers(failure=failure)
    seen = look(directory, scheduler)
    assert scheduler.calls == ["jobs"]
    assert isinstance(seen.jobs, Unknown)
    assert part in seen.jobs.why
    verdict = judge(seen, detect_all(seen))
    assert verdict.word is VerdictWord.HEALTHY, "the heartbeats are fresh"
    assert "scheduler unreachable" in verdict.why
    later = look(directory, scheduler, NOW + 90_000)
    assert judge(later, detect_all(later)).word is VerdictWord.UNKNOWN


@pytest.mark.parametrize(
    ("submitted", "now", "asked", "seen_as"),
    [
        (("n03", "n05"), ("n05",), 1, ["n05"]),  # n03 was let in since
        (("n03",), (), 1, []),
        ((), (), 0, []),  # nothing to be asked
    ],
)
def test_what_a_job_excludes_is_what_the_scheduler_keeps_of_it_now(
    directory: RunDirectory,
    submitted: tuple[str, ...],
    now: tuple[str, ...],
    asked: int,
    seen_as: list[str],
) -> None:
    own = submission(directory, excluded=submitted)
    waits = pending(comment=directory.comment(own.tag))
    scheduler = Records((waits,), excluded=now)
    seen = look(directory, scheduler)
    assert [entry.node for entry in known(seen.exclusions, ())] == seen_as
    assert scheduler.calls == ["jobs", "nodes", *[f"job {waits.job_id}"] * asked]
    ahead = AskedAhead(scheduler, "tr11-176B-ml")
    assert look(directory, ahead).exclusions == seen.exclusions
    without = look(directory, Answers((waits,)))
    assert [entry.node for entry in known(without.exclusions, ())] == list(submitted)


def test_a_job_keeps_no_reason_that_its_partition_has_outlived(directory: RunDirectory) -> None:
    """The scheduler's reason is that of its last attempt to start the job, the partition of now."""
    own = submission(directory)
    waits = pending(reason="PartitionInactive", partition="gpu", comment=directory.comment(own.tag))
    (seen,) = known(look(directory, Answers((waits,))).jobs, ())
    assert seen.reason == ""


def test_other_runs_jobs_do_not_count(directory: RunDirectory, tmp_path: Path) -> None:
    own = submission(directory)
    other_variant = submission(directory, job_id="1500", variant="ablation")
    elsewhere = RunDirectory(RunPaths(tmp_path / "other", "tr11-176B-ml", "main"), tmp_path / "k")
    jobs = {
        "marked": running(job_id="1", comment=f"night run {directory.comment(own.tag)} x"),
        "recorded": running(
            job_id="1000_2", raw_id="1002", array_id="1000", comment="", submit_time=NOW - 90
        ),
        "elsewhere": running(job_id="3", raw_id="1000", comment=elsewhere.comment(own.tag)),
        "variant": running(job_id="4", comment=directory.comment(other_variant.tag)),
        "by hand": running(job_id="5", raw_id="5", array_id=None, comment=""),
        "id of long ago": running(
            job_id="1000", raw_id="1000", submit_time=NOW - 9 * 86400, comment=""
        ),
    }
    seen = look(directory, Answers(tuple(jobs.values())))
    # one lease, one kill switch
    assert set(seen.jobs) == {jobs["marked"], jobs["recorded"], jobs["variant"]}
    assert set(seen.namesakes) == set(jobs.values()) - set(seen.jobs)


def test_the_newest_submission_says_which_scheduler(directory: RunDirectory) -> None:
    assert directory.recorded_scheduler() is None
    submission(directory)
    newest = Submission(new_tag(NOW), None, "local", NOW, "ana", "h", "r", "main", None, 1, "hash")
    directory.write_submission(newest)
    assert directory.recorded_scheduler() == "local"


# ----------------------------------------------------------------------------- damage
def test_damaged_files_are_unknown_and_the_rest_is_read(directory: RunDirectory) -> None:
    fill(directory)
    paths = directory.paths
    paths.heartbeat(2).write_text('{"rank": 2, "ho')
    paths.heartbeat(3).write_text(
        json.dumps({**json.loads(paths.heartbeat(1).read_text()), "rank": 3, "time": "yesterday"})
    )
    (paths.heartbeats / ".4.json.77").write_text("a heartbeat being written")
    paths.end_marker("1001").write_bytes(b"\xff\xfe\x00")
    paths.latest.write_text("the last one")
    directory.exclusions.write_text('{"exclusions": [{"nodes": 3}]}')
    (directory.submission(new_tag()).folder).mkdir()
    broken = directory.submission(new_tag()).record
    broken.parent.mkdir()
    broken.write_text("[]")
    seen = look(directory, Answers())
    assert [beat.rank for beat in seen.heartbeats] == [0, 1]
    assert isinstance(seen.exclusions, Unknown)
    assert isinstance(seen.checkpoints.latest, Unknown)
    assert [entry.note[:9] for entry in seen.submissions] == ["damaged: ", ""]
    assert str(broken) in {entry.path for entry in seen.damaged_files}
    told = "\n".join(seen.unknowns())
    for part in (
        "heartbeat 2.json",
        "heartbeat 3.json",
        "end of attempt 1001",
        "latest",
        "exclusions",
    ):
        assert part in told
    assert "\n\n" not in told


def test_folders_that_the_file_system_refuses_are_unknown(directory: RunDirectory) -> None:
    paths = directory.paths
    paths.state.mkdir()
    for path in (
        paths.heartbeats,
        paths.attempts,
        directory.submissions,
        directory.exclusions,
        paths.published,
    ):
        path.symlink_to(path)  # refused for everyone, root too, unlike missing rights
    (paths.root / "checkpoints").symlink_to(paths.root / "checkpoints")
    seen = look(directory, Answers())
    blind = (
        seen.heartbeats,
        seen.attempts,
        seen.checkpoints,
        seen.steps,
        seen.submissions,
        seen.exclusions,
    )
    loops = ("symbolic links", "a link that leads back to itself")
    assert all(
        isinstance(value, Unknown) and any(loop in value.why for loop in loops) for value in blind
    ), blind


def test_files_where_folders_belong_are_unknown(directory: RunDirectory) -> None:
    paths = directory.paths
    paths.state.mkdir()
    for path in (
        paths.heartbeats,
        paths.attempts,
        directory.submissions,
        paths.root / "checkpoints",
        paths.published,
    ):
        path.write_text("not a folder")
    seen = look(directory, Answers())
    blind = (seen.heartbeats, seen.attempts, seen.checkpoints, seen.steps, seen.submissions)
    assert all(isinstance(value, Unknown) for value in blind), blind
    assert judge(seen, detect_all(seen)).word is VerdictWord.UNKNOWN


def test_the_last_checkpoint_is_sought_as_deep_as_by_a_restart(directory: RunDirectory) -> None:
    paths = directory.paths
    save_checkpoint(paths, 8, NOW)
    save_checkpoint(paths, 9, NOW)
    cut_short = range(10, 22)
    for step in cut_short:
        (save_checkpoint(paths, step, NOW) / "weights" / "part.bin").write_bytes(b"short")
    paths.checkpoint(1000).mkdir()
    seen = look(directory, Answers())
    assert [(entry.step, entry.is_sound) for entry in seen.checkpoints.examined] == [
        (1000, False),
        *((step, False) for step in reversed(cut_short)),
        (9, True),
    ]
    assert seen.checkpoints.newest_sound.step == 9


def test_digests_are_read_only_when_asked(directory: RunDirectory) -> None:
    part = save_checkpoint(directory.paths, 9, NOW) / "weights" / "part.bin"
    part.write_bytes(bytes(1024))
    assert look(directory, Answers()).checkpoints.newest_sound.step == 9
    with_digests = observe(directory, facts(directory), Answers(), NOW, read_digests=True)  # type: ignore[arg-type]
    assert not isinstance(with_digests.checkpoints, Unknown)
    assert with_digests.checkpoints.newest_sound is None


@pytest.mark.parametrize(
    ("content", "who", "why"),
    [
        ('{"who": "ben", "why": "new data", "time": 5}', "ben", "new data"),
        ("", "", ""),
        ("stop!", "", ""),
        ("[1]", "", ""),
    ],
)
def test_the_kill_switch_counts_whatever_it_holds(
    tmp_path: Path, content: str, who: str, why: str
) -> None:
    path = tmp_path / "switch"
    assert read_kill_switch(path) is None
    path.write_text(content)
    switch = read_kill_switch(path)
    assert isinstance(switch, KillSwitch)
    assert (switch.who, switch.why) == (who, why)
    assert switch.time is not None


def test_odd_kill_switches_count_too(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("folder", "dangling"):
        assert isinstance(read_kill_switch(tmp_path / name), KillSwitch)
    (tmp_path / "file").write_text("")
    assert isinstance(read_kill_switch(tmp_path / "file" / "switch"), Unknown)


def test_many_attempts_and_many_ranks(directory: RunDirectory) -> None:
    paths = directory.paths
    for number in range(200):
        marker = ended(str(2000 + number), age=float(200 - number)).end
        assert isinstance(marker, EndMarker)
        save_marker(paths, marker)
        os.utime(paths.attempt(marker.job_id), (NOW, NOW - 200 + number))
    for rank in range(384):
        write_heartbeat(paths.heartbeat(rank), Heartbeat(rank, "n", 1, "training", 1, NOW, "2199"))
    seen = look(directory, Answers())
    assert len(seen.heartbeats) == 384
    newest: Attempt = seen.attempts[0]
    assert (newest.job_id, len(seen.attempts)) == ("2199", 8)


# ----------------------------------------------------------------------------- a real scheduler
@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalScheduler]:
    scheduler = LocalScheduler(tmp_path / "scheduler")
    yield scheduler
    for job in scheduler.jobs():
        if not job.state.is_final:
            scheduler.cancel(job.raw_id if job.array_id is None else job.array_id)
    until(lambda: all(job.state.is_final for job in scheduler.jobs()), "the end of all jobs")


def test_the_embedded_scheduler_with_nine_thousand_queued_tasks(
    directory: RunDirectory, local: LocalScheduler
) -> None:
    def request(name: str, comment: str, array: str) -> BatchRequest:
        return BatchRequest(
            script="#!/bin/bash\nsleep 60\n",
            name=name,
            nodes=1,
            time_limit_seconds=600,
            output="%x-%j.out",
            working_directory=directory.root if comment else directory.root.parent,
            array=array,
            comment=comment,
            hold=True,
        )

    record = submission(directory)
    job_id = local.submit(request("tr11-176B-ml", directory.comment(record.tag), "1-9000%1"))
    local.submit(request("tr11-176B-ml", "", "1-3%1"))
    seen = look(directory, local, time.time())
    (job,) = seen.jobs
    assert (job.raw_id, len(job.pending_tasks), job.state) == (job_id, 9000, JobState.PENDING)
    assert len(seen.namesakes) == 1
    verdict = judge(seen, detect_all(seen))
    assert (verdict.word, "9,000 tasks of job" in verdict.why) == (VerdictWord.DOWN, True)
    local.release(job_id)
    deadline = time.monotonic() + 300
    while True:  # the scheduler's own process takes note of the release a moment later
        waiting = look(directory, local, time.time())
        word = judge(waiting, detect_all(waiting)).word
        if word in {VerdictWord.QUEUED, VerdictWord.STARTING}:
            break
        assert time.monotonic() < deadline, word
        time.sleep(0.1)

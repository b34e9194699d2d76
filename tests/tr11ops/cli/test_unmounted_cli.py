"""Stopping a run from a machine that has not mounted its directory: the scheduler is asked, and
nothing is hidden.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import NODES, Answer, LocalBench
from tests.twin.small_run import recorded_comment
from tr11ops.cli.common import directory_of
from tr11ops.cluster.base import Job
from tr11ops.runcard.card import load_card
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory

WAITS = "trap 'echo USR1 > {folder}/signal; exit 0' USR1; while :; do sleep 0.05; done"


@dataclass
class Stage:
    """A run with a job that trains (it says in the bench's folder which signal came) and one queued
    behind it.
    """

    bench: LocalBench
    directory: RunDirectory
    job: str
    queued_name: str

    def type(self, *words: str) -> Answer:
        return self.bench.tr11(*words, "--run", str(self.bench.card), "--scheduler", "local")

    def unmount(self, leaves_mount_point: bool = True) -> None:
        root = self.directory.root
        root.rename(root.with_name("mounted"))
        if leaves_mount_point:
            root.mkdir()

    def mount(self) -> None:
        """The run's own directory is back. Nothing may have been written where it was not."""
        root = self.directory.root
        if root.exists():
            assert not [path for path in root.rglob("*") if path.is_file()]
            for path in sorted(root.rglob("*"), reverse=True):
                path.rmdir()
            root.rmdir()
        root.with_name("mounted").rename(root)

    def trains(self) -> bool:
        return any(job.raw_id == self.job and job.state.is_active for job in self.bench.living())

    def queued(self) -> Job:
        return next(job for job in self.bench.living() if job.raw_id == self.queued_name)


@pytest.fixture
def stage(bench: LocalBench) -> Stage:
    directory = directory_of(load_card(bench.card, (), {}))
    comment = recorded_comment(directory)
    number = bench.submit(WAITS.format(folder=bench.folder), NODES, "small", comment)
    bench.wait(lambda jobs: any(job.raw_id == number and job.state.is_active for job in jobs))
    return Stage(bench, directory, number, bench.submit("sleep 600", NODES, "small", comment))


@pytest.mark.parametrize("leaves_mount_point", [True, False])
def test_kill_asks_the_scheduler(stage: Stage, leaves_mount_point: bool) -> None:
    stage.unmount(leaves_mount_point)
    shown = stage.type("kill", "--dry-run")
    assert shown.code == 0 and "its file system is not mounted here" in shown.err and stage.trains()
    assert "not known:  iteration, checkpoint" in shown.err and "none yet" not in shown.err
    assert "no kill switch is set; the scheduler is asked" in shown.err
    said = stage.type("kill", "--yes", "--json", "--reason", "a test")
    assert (said.code, said.json["action"]) == (0, "asked-scheduler"), said.err
    assert said.json["held"] == [stage.queued_name] and "not mounted" in said.json["unknown"]
    assert (
        f"job {stage.job} was sent USR1: it saves and leaves" in said.err
        and "then type `tr11 resume" in said.err
    )
    stage.bench.wait(lambda jobs: not stage.trains())
    assert (
        stage.bench.folder / "signal"
    ).read_text() == "USR1\n" and stage.queued().reason == "JobHeldUser"
    assert leaves_mount_point or not stage.directory.root.exists()
    assert stage.type("resume", "--yes").code == 3 and stage.queued().reason == "JobHeldUser"
    stage.mount()
    stage.type("pulse", "--no-email")
    entries = read_journal(stage.directory.journal).entries
    assert [(entry.kind, entry.why) for entry in entries[:2]] == [
        ("stop-asked", "a test"),
        ("held", "a test"),
    ]
    resumed = stage.type("resume", "--yes", "--json")
    assert (resumed.code, resumed.json["released"]) == (0, [stage.queued_name]), resumed.err


def test_kill_now_cancels_what_runs_after_the_hold_of_what_is_next(stage: Stage) -> None:
    stage.unmount()
    shown = stage.type("kill", "--now", "--dry-run")
    assert "lost:       not known: the run directory is not mounted here" in shown.err
    said = stage.type("kill", "--now", "--yes")
    assert said.code == 0 and said.err.index("held: job") < said.err.index(
        f"cancelled: job {stage.job}"
    ), said.err
    stage.bench.wait(lambda jobs: not stage.trains())
    assert stage.queued().reason == "JobHeldUser"


def test_pause_holds_what_is_queued(stage: Stage) -> None:
    stage.unmount()
    said = stage.type("pause", "--yes")
    assert said.code == 0 and "no pause is set" in said.err, said.err
    assert stage.trains() and stage.queued().reason == "JobHeldUser"
    local = existing_fallback(stage.directory)
    assert local is not None and [entry.kind for entry in read_journal(local.journal).entries] == [
        "pause",
        "held",
    ]
    stage.mount()
    assert stage.type("resume", "--yes").code == 0 and not stage.queued().reason.startswith(
        "JobHeld"
    )


def test_a_wait_says_that_what_was_saved_is_not_known(stage: Stage) -> None:
    stage.unmount()
    said = stage.type("kill", "--yes", "--wait", "--timeout", "300")
    assert said.code == 1 and "what it saved is not known" in said.out, said.out + said.err


def test_a_job_that_may_be_the_runs_is_not_said_to_be_stopped(stage: Stage) -> None:
    """Without its records a job of its name may be one that was submitted by hand."""
    card = load_card(stage.bench.card, (), {})
    other = stage.bench.submit("sleep 600", NODES, card.run.name)
    stage.unmount()
    said = stage.type("kill", "--yes")
    assert said.code == 3 and f"whether job {other} is of this run cannot be told" in said.err, (
        said.err
    )
    stage.bench.wait(lambda jobs: not stage.trains())


def test_with_nothing_to_stop_it_is_refused(stage: Stage) -> None:
    stage.unmount()
    stage.bench.clear()
    for command in ("kill", "pause"):
        said = stage.type(command, "--yes")
        assert said.code == 3 and "not mounted here" in said.err, said.err
    assert not list(stage.directory.root.iterdir())


def test_what_another_owns_goes_on_and_is_said_to(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tr11ops.queue.held_jobs.can_modify", lambda job, user: job.raw_id != stage.queued_name
    )
    stage.unmount()
    said = stage.type("kill", "--yes")
    assert said.code == 1 and "no file keeps it from training" in said.err, said.err
    assert not stage.queued().reason.startswith("JobHeld")


def test_a_stray_switch_in_the_mount_point_stops_no_one(stage: Stage) -> None:
    stage.unmount()
    os.close(os.open(stage.directory.kill_switch, os.O_CREAT | os.O_WRONLY))
    said = stage.type("kill", "--yes", "--json")
    assert (said.code, said.json["action"]) == (0, "asked-scheduler"), said.err
    Path(stage.directory.kill_switch).unlink()

"""The watchdog on real Slurm with stand-in workers: every state told apart, and what it repairs in
one pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.small_run import SmallRun, enter
from tests.waiting import until
from tr11ops.base import deadline
from tr11ops.cli import pulse as command
from tr11ops.cli.main import execute
from tr11ops.cli.runner import RunContext
from tr11ops.cluster.base import JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.rundir.action_log import Result
from tr11ops.rundir.attempts import stacks_folder
from tr11ops.rundir.paths import new_tag
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from tr11ops.watchdog.log_lines import State
from tr11ops.watchdog.pulse import Pulse, WatchedRun, take_pulse
from tr11ops.watchdog.stacks import keep_stacks

# three times the patience with a first step, of which nothing was learned, and more
GIVEN_UP_SECONDS = 4 * 3600.0
COMMANDS = ("squeue", "scontrol", "sinfo", "sbatch", "scancel", "sacct")


@pytest.fixture(scope="module")
def pulse_twin(twin_home: Path) -> Iterator[Twin]:
    """Nodes of its own: one is killed here, and Slurm has to notice within seconds."""
    require_slurm()
    with Twin.up(
        TwinPlan(
            name="pulse",
            nodes=5,
            gpus=0,
            cpu_nodes=0,
            slurmd_timeout_seconds=5,
            message_timeout_seconds=5,
        ),
        twin_home,
    ) as made:
        yield made


class WatchedSmallRun(SmallRun):
    """A run that is watched from its folder, with every call of Slurm's commands on record."""

    def pulse(
        self, *, act: bool = False, later: float = 0.0, timeout: float | None = None
    ) -> Pulse:
        """A pass, looked at from `later`; `timeout` is the patience with a silent controller."""
        reader, hand = command._edges("slurm")
        assert hand is not None
        if timeout is not None:
            reader = SlurmScheduler(self.twin.environment, timeout_seconds=timeout)
        actuator = command._actuator(RunContext(), hand) if act else None
        run = WatchedRun(self.card, self.directory, reader, "root")
        return take_pulse(run, actuator, email=False, now=lambda: time.time() + later)

    def until(self, state: State, words: str = "", later: float = 0.0) -> Pulse:
        """The first look that sees this state and says these words: a state may
        begin before what follows from it can be said."""

        def reached() -> Pulse | None:
            seen = self.pulse(later=later)
            if seen.state is state and said(seen, words):
                return seen
            return None

        found = until(reached, state, pause=0.3, context=lambda: self.pulse(later=later))
        assert found is not None
        return found

    def until_it_trains(self) -> None:
        self.until(State.RUNNING)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        found = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return found


@pytest.fixture
def stage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WatchedSmallRun]:
    """A run on the twin of that name."""
    on: Twin = request.getfixturevalue(request.param)
    enter(on, tmp_path, monkeypatch)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in COMMANDS:
        real = shutil.which(name)
        assert real is not None
        (tools / name).write_text(f'#!/bin/sh\necho {name} >> {tmp_path}/calls\nexec {real} "$@"\n')
        (tools / name).chmod(0o755)
    made = WatchedSmallRun(tmp_path, on)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    yield made
    assert not [healing.error for healing in heal(on) if healing.error]
    made.clear()


def said(seen: Pulse, words: str) -> bool:
    return any(words in line for line in seen.lines)


@pytest.mark.parametrize("stage", ["twin"], indirect=True)  # where a node may be slow to answer
def test_each_state_of_a_run_is_told_apart(
    stage: WatchedSmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    filler = stage.take_nodes(5)
    assert execute(["launch", "--array", "1-3", "--scheduler", "slurm"]) == 0
    queued = stage.until(State.QUEUED, " is waiting to be scheduled (")
    assert queued.verdict.exit_code == 0
    stage.slurm.cancel(filler)
    stage.until_it_trains()

    stage.calls()
    running = stage.pulse(act=True)
    assert stage.calls() == ["squeue", "sinfo"]
    assert (running.state, running.verdict.exit_code, running.plan.is_empty) == (
        State.RUNNING,
        0,
        True,
    )
    assert (
        len(running.lines) == 2
        and said(running, "running for 0:")
        and said(running, "previous Job Array job")
    )

    hung = stage.pulse(later=GIVEN_UP_SECONDS)
    assert (hung.state, hung.verdict.exit_code) == (State.HUNG, 1) and said(hung, " is HUNG: job ")
    task = stage.running()
    later = time.time() + GIVEN_UP_SECONDS
    told = keep_stacks(
        stage.card.paths, task.raw_id, task.nodes, len(task.nodes), os.environ, later
    )
    assert "the stacks of 3 nodes are in" in told  # one is spare
    kept = {
        path.stem: path.read_text()
        for path in stacks_folder(stage.card.paths, task.raw_id).iterdir()
    }
    assert set(kept) == {*task.nodes[:3], "verdict"} and "rank 0, process " in kept[task.nodes[0]]
    assert [action.name for action in stage.pulse(later=GIVEN_UP_SECONDS).plan.actions] == [
        "cancel"
    ]

    inject(stage.twin, "controller-frozen")
    stage.calls()
    silent = stage.pulse(act=True, later=GIVEN_UP_SECONDS, timeout=1)
    assert stage.calls() == ["squeue"]
    assert (silent.state, silent.verdict.exit_code) == (State.CONTROLLER_AWAY, 3)
    assert not silent.observed and not silent.plan.actions and not said(silent, "ALERT")
    alive = stage.pulse(timeout=1)
    assert (alive.state, alive.verdict.exit_code, alive.observed) == (
        State.CONTROLLER_AWAY,
        0,
        True,
    )
    heal(stage.twin)

    task = stage.running()
    array = str(task.array_id)
    stage.slurm.hold(array)
    stage.slurm.cancel(f"{array}_{task.task_id}")
    held = stage.until(State.HELD, " is HELD: job ")
    while held.verdict.exit_code != 1:  # until the cancelled task has left its nodes
        time.sleep(0.3)
        held = stage.pulse()
    assert said(held, " is HELD: job ") and stage.pulse(act=True).plan.is_empty  # a person holds it
    stage.clear()

    # the job leaves its nodes first, and nothing is put in its place until it has
    down = stage.until(State.DOWN, "would resubmit 1-3")
    assert down.verdict.exit_code == 1
    assert down.lines[0].endswith(
        "***ALERT: heal is not RUNNING or SCHEDULED! Alert someone at Eng WG***"
    )
    capsys.readouterr()
    assert execute(["pulse", "--act", "--no-email"]) == 1
    assert "submitted as job" in capsys.readouterr().out
    (again,) = {job.array_id for job in stage.living()}
    assert not stage.pulse(act=True).plan.actions
    stage.clear()
    assert not stage.pulse(act=True).plan.actions and again, "twice without any progress"

    arguments = [
        "--job-name=heal",
        "--partition=gpu_p5",
        "--kill-on-invalid-dep=no",
        "--output=/dev/null",
    ]
    comment = f"--comment={stage.directory.comment(new_tag())}"
    subprocess.run(
        ["sbatch", *arguments, comment, f"--dependency=afterok:{again}", "--wrap=true"], check=True, timeout=120,
        capture_output=True,
    )  # fmt: skip
    dead = stage.until(State.DEAD_CHAIN, "can never start: DependencyNeverSatisfied")
    assert dead.verdict.exit_code == 1
    assert [action.name for action in dead.plan.actions] == ["cancel"]
    log = stage.card.paths.main_log.read_text()
    assert log.count("submitted as job") == 1 and "PULSE: heal is HELD" in log

    inject(stage.twin, "controller-frozen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadline, "SCHEDULER_SECONDS", 1.0)
        assert execute(["kill", "--yes"]) == 0 and stage.directory.kill_switch_is_set()
        assert (
            "the scheduler did not answer (scontrol did not answer within 1 s)"
            in capsys.readouterr().err
        )
        assert execute(["status"]) == 3
    heal(stage.twin)


@pytest.mark.parametrize("stage", ["pulse_twin"], indirect=True)
def test_a_half_dead_batch_host_is_told_and_its_job_leaves_by_itself(
    stage: WatchedSmallRun,
) -> None:
    assert execute(["launch", "--scheduler", "slurm"]) == 0
    stage.until_it_trains()
    job = stage.running()
    host = job.nodes[0]
    inject(stage.twin, "half-dead", node=host)
    half = stage.until(State.HALF_DEAD, " is HALF-DEAD: ")
    assert not half.plan.actions
    # the job leaves its nodes first, and nothing is put in its place until it has
    down = stage.until(State.DOWN, "would resubmit 1-3")
    assert down.verdict.exit_code == 1
    acted = stage.pulse(act=True)
    assert [one.action.name for one in acted.done] == ["resubmit"] and acted.done[
        0
    ].result is Result.DONE, acted.lines
    assert {one.excluded for one in stage.living() if one.raw_id != job.raw_id} == {(host,)}


@pytest.mark.parametrize("stage", ["pulse_twin"], indirect=True)
def test_a_lost_batch_host_is_ended_in_one_pass(stage: WatchedSmallRun) -> None:
    assert execute(["launch", "--scheduler", "slurm"]) == 0
    stage.until_it_trains()
    job = stage.running()
    host = job.nodes[0]
    inject(stage.twin, "batch-host-dead", node=host)
    # trainers that are silent for half a minute count as gone
    lost = stage.until(
        State.ZOMBIE, f"would cancel {job.raw_id}: its batch host {host} is lost", later=60
    )
    assert lost.verdict.exit_code == 1
    acted = stage.pulse(act=True, later=60)
    assert [one.action.name for one in acted.done] == ["exclude", "cancel", "resubmit"]
    assert {one.result for one in acted.done} == {Result.DONE}, acted.lines
    assert not any(
        one.raw_id == job.raw_id and one.state is JobState.RUNNING for one in stage.living()
    )
    # the first task may have started by now
    fresh = [one for one in stage.living() if one.raw_id != job.raw_id]
    assert {one.excluded for one in fresh} == {(host,)}
    assert len({one.array_id for one in fresh}) == 1 and fresh[0].array_id is not None
    assert not stage.pulse(act=True, later=60).plan.actions

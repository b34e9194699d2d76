"""The allocation heals itself: every fault of the acceptance list, really done on a twin, under a
rehearsal's load.

The small ones run always, on 10 nodes; the long ones, and the full size of 48 + 4, with `-m soak`.
Figures are by the scheduler's and the records' time stamps; they are written to `acceptance.json`
in pytest's base folder, and shown.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.operation import Operation
from tests.twin.rehearsal_inputs import steps_of
from tests.waiting import until
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.twin.fault_effects import FOREIGN_REASON
from tr11ops.twin.faults import active, heal, inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

PLAN = TwinPlan(
    name="stage", nodes=10, gpus=8, cpu_nodes=0, slurmd_timeout_seconds=5, kill_wait_seconds=2,
    message_timeout_seconds=5,
)  # fmt: skip
NODES = PLAN.node_names
# longer than any client of this twin waits
FROZEN = [12.0, pytest.param(60.0, marks=pytest.mark.soak)]


@pytest.fixture(scope="module")
def whole_stage(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    with Twin.up(PLAN, twin_home) as running:
        yield running


@pytest.fixture
def stage(whole_stage: Twin) -> Iterator[Twin]:
    """The twin of this module, with no job and no fault left after each test."""
    yield whole_stage
    end_all(whole_stage)


def end_all(twin: Twin) -> None:
    heal(twin)
    slurm = SlurmScheduler(twin.environment)

    def is_idle() -> bool:
        jobs = [job for job in slurm.jobs() if not job.state.is_final]
        for job in jobs:
            slurm.cancel(job.raw_id if job.array_id is None else job.array_id)
        return not jobs and set((twin.node_states() or {"": ""}).values()) == {"idle"}

    until(is_idle, "an idle twin", pause=0.3, context=lambda: (slurm.jobs(), twin.node_states()))


@pytest.fixture
def report(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, Any], None]:
    """Keep and show figures."""

    def note(name: str, figures: Any) -> None:
        path = tmp_path_factory.getbasetemp() / "acceptance.json"
        value = json.loads(path.read_text()) if path.exists() else {}
        value[name] = figures
        path.write_text(json.dumps(value, indent=1))
        with capsys.disabled():
            print(f"\n{name}: {json.dumps(figures)}")

    return note


def rounded(figures: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: round(value, 3) for key, value in each.items()} for each in figures]


# ------------------------------------------------------------------------ in every run of the tests
def test_a_fault_at_the_first_the_middle_and_the_last_node(
    stage: Twin, tmp_path: Path, report: Callable[[str, Any], None]
) -> None:
    """Spares take the places of nodes that lost a worker, and when there is none, one that did so
    earlier.

    A node that another hand has drained meanwhile stays as it is, and is neither used nor listed.
    """
    inject(stage, "drain", node=NODES[9])
    run = Operation(stage, tmp_path, nodes=4, spares=2)
    run.launch("--array", "1-10")
    bad: list[str] = []
    for number, place in enumerate((0, 2, -1), 1):
        run.until_trains_again(number, more=6)
        node = run.launches()[-1]["nodes"][place]
        inject(stage, "worker-crash", node=node)
        bad.append(node)
    run.until_trains_again(4, more=6)
    first, second, third, fourth = run.launches()[:4]
    assert [launch["suspects"] for launch in (first, second, third)] == [[node] for node in bad]
    assert {launch["job_id"] for launch in (first, second, third, fourth)} == {first["job_id"]}
    assert set(bad) & set(fourth["nodes"]) == {bad[0]} and len(fourth["nodes"]) == 4
    assert run.excluded() == set() and run.tasks_left() == 9
    assert not any(NODES[9] in launch["nodes"] for launch in run.launches())
    facts = subprocess.run(
        ["scontrol", "show", "node", NODES[9]],
        env=stage.client_environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "DRAIN" in facts and f"Reason={FOREIGN_REASON} [" in facts
    run.check_nothing_is_lost()
    figures = run.relaunch_figures()
    report("worker crash at first, middle and last node", rounded(figures))
    assert [figure["same_allocation"] for figure in figures[:3]] == [True, True, True]


def test_a_black_hole_burns_one_task_of_an_array_of_ten(
    stage: Twin, tmp_path: Path, report: Callable[[str, Any], None]
) -> None:
    """No spare, and the bad node is the batch host, where the next task would go again: it is
    avoided then.
    """
    inject(stage, "black-hole", node=NODES[0])
    run = Operation(stage, tmp_path, nodes=4, spares=0)
    run.launch("--array", "1-10")
    run.until_step(6)
    launches = run.launches()
    report("black hole, array of 10", {"burned": len(run.attempts()) - 1, "left": run.tasks_left()})
    assert run.tasks_left() >= 8
    assert (
        launches[0]["suspects"] == launches[1]["avoided"] == [NODES[0]]
        and NODES[0] not in launches[-1]["nodes"]
    )
    assert run.excluded() == {NODES[0]}
    assert run.log().count(f"tr11: {NODES[0]} is excluded") <= 1
    run.check_nothing_is_lost()


def froze(twin: Twin) -> Callable[[float], None]:
    """Freeze the controller. What comes back thaws it, but not before so many seconds have passed."""
    inject(twin, "controller-frozen")
    began = time.monotonic()

    def thaw(seconds: float) -> None:
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        assert [healing.error for healing in heal(twin, kind="controller-frozen")] == [""]

    return thaw


@pytest.mark.parametrize("seconds", FROZEN)
def test_an_absent_controller_stops_none_and_a_kill_starts_none(
    stage: Twin, tmp_path: Path, seconds: float
) -> None:
    run = Operation(stage, tmp_path, nodes=3, spares=1)
    run.launch("--array", "1-11")
    run.until_step(3)
    inject(stage, "controller-restarted")
    run.until_step(run.iteration() + 3)
    thaw = froze(stage)
    before = run.iteration()
    shown = run.tr11("status", expect=None)
    words = " ".join(shown.stdout.split())
    assert shown.returncode in {0, 3} and "scheduler unreachable" in words, (
        "what was not seen is unknown, not gone"
    )
    thaw(seconds)
    assert run.iteration() > before and len(run.launches()) == 1
    assert len(run.attempts()) == 1 and run.tasks_left() == 10

    run.tr11("kill", "--yes", "--wait", "--reason", "acceptance")
    [end] = run.ends()
    assert (end.reason, end.checkpoint_step) == ("kill-switch", end.iteration)
    time.sleep(5)  # long enough for the scheduler to start what it may: it looks every second
    assert len(run.attempts()) == 1 and run.tasks_left() in {0, 10}
    run.check_nothing_is_lost()


@pytest.mark.parametrize("seconds", FROZEN)
def test_a_controller_frozen_in_the_submission_yields_one_job(
    stage: Twin, tmp_path: Path, seconds: float
) -> None:
    run = Operation(stage, tmp_path, nodes=2, spares=0)
    plan = run.tr11("launch", "--array", "1-2", "--dry-run")
    assert "nothing was submitted" in plan.stdout
    thaw = froze(stage)
    refused = run.tr11("launch", "--array", "1-2", expect=None)
    assert refused.returncode == 3
    thaw(seconds)
    run.until(lambda: stage.node_states() is not None, "it answers")
    again = run.tr11("launch", "--array", "1-2", expect=None)
    assert again.returncode in {0, 1}
    run.until_step(2)
    assert len({job.array_id for job in run.jobs()}) == 1 and len(run.attempts()) == 1


# ----------------------------------------------------------------------------- long
@pytest.mark.soak
def test_a_node_dies_in_the_middle(
    stage: Twin, tmp_path: Path, report: Callable[[str, Any], None]
) -> None:
    run = Operation(stage, tmp_path, nodes=5, spares=1)
    run.launch("--array", "1-3")
    run.until_trains_again(1, more=6)
    node = run.launches()[0]["nodes"][2]
    began = time.time()
    inject(stage, "node-dead", node=node)
    run.until_trains_again(2, more=6)
    first, second = run.launches()[:2]
    assert (
        first["blamed"] == [node]
        and first["job_id"] == second["job_id"]
        and node not in second["nodes"]
    )
    run.check_nothing_is_lost()
    [figure] = run.relaunch_figures()[:1]
    report("node death", {**rounded([figure])[0], "fault_to_end": round(first["end"] - began, 3)})
    assert run.tasks_left() == 2


@pytest.mark.soak
def test_a_half_dead_node_is_found_out(
    stage: Twin, tmp_path: Path, report: Callable[[str, Any], None]
) -> None:
    run = Operation(stage, tmp_path, nodes=4, spares=1)
    run.launch("--array", "1-3")
    run.until_trains_again(1, more=6)
    node = run.launches()[0]["nodes"][2]
    began = time.time()
    inject(stage, "half-dead", node=node)
    run.until(
        lambda: "down" in (stage.node_states() or {}).get(node, ""), "the controller has noticed"
    )
    run.until_trains_again(2, more=6)
    first = run.launches()[0]
    assert first["blamed"] == [node] and node not in run.launches()[1]["nodes"]
    run.until(
        lambda: all(node in job.excluded for job in run.jobs() if not job.state.is_active),
        "queued jobs knows it",
    )
    report(
        "half-dead node", {"fault_to_end": round(first["end"] - began, 3), "left": run.tasks_left()}
    )
    run.check_nothing_is_lost()


@pytest.mark.soak
def test_the_batch_host_dies(
    stage: Twin, tmp_path: Path, report: Callable[[str, Any], None]
) -> None:
    """The allocation stays, with no one in it (P19); `tr11 launch --repair` ends it, and the next
    task trains.
    """
    run = Operation(stage, tmp_path, nodes=4, spares=1)
    run.launch("--array", "1-3")
    run.until_trains_again(1, more=6)
    [first], began = run.attempts(), time.time()
    host = inject(stage, "batch-host-dead").fault.target
    run.until(
        lambda: "down" in (stage.node_states() or {}).get(host, ""), "the controller has noticed"
    )
    noticed = time.time()
    repair = ("launch", "--repair", "--yes")  # it waits for some silence of the trainers
    run.until(
        lambda: "cancel" in run.tr11(*repair, expect=None).stdout,
        "the zombie is told from a living job",
    )
    run.until_trains_again(2, more=6)
    run.until(
        lambda: not any(job.raw_id == first and job.state.is_active for job in run.jobs()),
        "the zombie is gone",
    )
    [_, second] = run.launches()
    assert host not in second["nodes"] and second["job_id"] != first
    figures = {
        "fault_to_noticed": round(noticed - began, 3),
        "noticed_to_start": round(second["start"] - noticed, 3),
    }
    report("batch host death", {**figures, "tasks_left": run.tasks_left()})
    run.check_nothing_is_lost()


@pytest.mark.soak
@pytest.mark.parametrize("spares", [2, 1])
def test_two_bad_nodes_with_enough_spares_and_with_too_few(
    stage: Twin, tmp_path: Path, spares: int
) -> None:
    for node in NODES[:2]:
        inject(stage, "black-hole", node=node)
    run = Operation(stage, tmp_path, nodes=4, spares=spares)
    run.launch("--array", "1-10")
    run.until_step(6)
    tasks = len(run.attempts())  # which of the two fails first decides when each has failed twice
    most, excluded = (1, set()) if spares == 2 else (3, set(NODES[:2]))
    assert tasks <= most and run.tasks_left() == 10 - tasks
    assert run.excluded() == excluded and not set(NODES[:2]) & set(run.launches()[-1]["nodes"])
    run.check_nothing_is_lost()


@pytest.mark.soak
def test_a_fault_that_comes_back_on_every_node_holds_the_array(stage: Twin, tmp_path: Path) -> None:
    """Then it is not the nodes: queued jobs are held for a person, and no more than two tasks are
    burned.
    """
    for node in NODES:
        inject(stage, "black-hole", node=node)
    run = Operation(stage, tmp_path, nodes=4, spares=2)
    run.launch("--array", "1-10")
    run.until(lambda: "ALERT" in run.log(), "an alert")
    run.until(lambda: not any(job.state.is_active for job in run.jobs()), "the task has ended")
    assert run.tasks_left() >= 8 and len(run.attempts()) <= 2
    run.until(
        lambda: {job.reason for job in run.jobs()} <= {"JobHeldUser", "JobHeldAdmin"}, "the hold"
    )
    assert run.log().count("ALERT") == 1


@pytest.mark.soak
def test_the_controller_is_frozen_during_an_exclusion(stage: Twin, tmp_path: Path) -> None:
    run = Operation(stage, tmp_path, nodes=4, spares=0)
    run.launch("--array", "1-10")
    run.until_trains_again(1, more=6)
    node = run.launches()[0]["nodes"][1]
    inject(stage, "worker-crash", node=node)
    run.until_trains_again(2, more=6)  # on the same nodes: there is no spare
    inject(stage, "controller-frozen", seconds=60)
    inject(stage, "worker-crash", node=node)
    run.until(lambda: active(stage) == (), "the controller is back")
    run.until_trains_again(3, more=6)
    assert node in run.excluded() and node not in run.launches()[-1]["nodes"]
    assert run.tasks_left() >= 8
    run.check_nothing_is_lost()


@pytest.mark.soak
def test_a_worker_that_hangs_is_ended_and_the_training_goes_on(stage: Twin, tmp_path: Path) -> None:
    run = Operation(stage, tmp_path, nodes=4, spares=1, changes=["rehearsal.collective_seconds=10"])
    run.launch("--array", "1-3")
    run.until_trains_again(1, more=6)
    node = run.launches()[0]["nodes"][2]
    inject(stage, "worker-stop", node=node)
    run.until_trains_again(2, more=6)
    run.check_nothing_is_lost()


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_full_size(twin_home: Path, tmp_path: Path, report: Callable[[str, Any], None]) -> None:
    """48 + 4 nodes, 384 workers: a crash, a node's death, and a black hole, each healed on a spare."""
    require_slurm()
    plan = TwinPlan(
        name="fullsize",
        nodes=52,
        gpus=8,
        cpu_nodes=0,
        slurmd_timeout_seconds=20,
        kill_wait_seconds=5,
    )
    shape = (
        "slurm.workers_per_node=8", "parallel.tensor=4", "parallel.pipeline=12", "model.layers=70",
        "batch.global_batch_size=192", "batch.micro_batch_size=2", "rehearsal.step_seconds=105",
        "rehearsal.start_seconds=300", "resilience.exclusion_cap_percent=10", "checkpoint.interval=10",
    )  # fmt: skip
    with Twin.up(plan, twin_home) as twin:
        run = Operation(twin, tmp_path, nodes=48, spares=4, changes=shape)
        run.launch("--array", "1-10")
        kinds = ("worker-crash", "node-dead", "black-hole")
        for number, kind in enumerate(kinds, 1):
            run.until(lambda number=number: len(run.launches()) >= number, f"launch {number}", 900)  # type: ignore[misc]
            began = run.launches()[-1]["start"]
            run.until(
                lambda began=began: sum(step["time"] > began for step in steps_of(run.paths)) >= 12,
                "steps",
                900,
            )  # type: ignore[misc]
            inject(twin, kind, node=run.launches()[-1]["nodes"][10 * number])
        run.until(lambda: len(run.launches()) >= 4, "launch 4", 900)
        began = run.launches()[-1]["start"]
        run.until(
            lambda: sum(step["time"] > began for step in steps_of(run.paths)) >= 12,
            "steps of launch 4",
            900,
        )
        assert len(run.attempts()) == 1 and run.tasks_left() == 9
        report("full size", dict(zip(kinds, rounded(run.relaunch_figures()), strict=True)))
        run.check_nothing_is_lost()

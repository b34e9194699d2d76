"""The allocation that heals itself, on real Slurm with stand-in workers: 3 nodes and a spare, on a
twin of six.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.excluding import exclude
from tests.plugins.twin_fixture import require_slurm
from tests.tr11ops.launch.run_inputs import write_checkpoint
from tests.twin.small_run import SmallRun
from tr11ops.cli.main import execute
from tr11ops.cluster.base import JobState
from tr11ops.rundir.exclusions import EXCLUDED, INCLUDED, read_version
from tr11ops.rundir.journal import read_journal
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

NODES = tuple(f"jean-zay-iam0{number}" for number in range(1, 7))


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    """Six nodes of its own: they are killed here, and Slurm has to notice within seconds."""
    require_slurm()
    with Twin.up(
        TwinPlan(
            name="relaunch",
            nodes=6,
            gpus=0,
            cpu_nodes=0,
            slurmd_timeout_seconds=6,
            message_timeout_seconds=5,
        ),
        twin_home,
    ) as made:
        yield made


def change(stage: SmallRun, node: str, *words: str) -> None:
    """Change a node as its administrators do."""
    subprocess.run(
        ["scontrol", "update", f"NodeName={node}", *words],
        env=stage.twin.client_environment,
        check=True,
        timeout=60,
    )


def diagnosed(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> dict[str, Any]:
    """What `tr11 diagnose` says of the run."""
    capsys.readouterr()
    assert execute(["diagnose", "--json", *words]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_crash_is_relaunched_on_the_spare_and_finishes(
    stage: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.launch(3, "batch.train_samples=1200")
    attempt = stage.train()
    inject(stage.twin, "worker-crash", node=NODES[1])
    stage.wait_for_verdict(attempt)
    first, second = stage.launches(attempt)
    assert (first["cause"], first["blamed"], first["suspects"]) == ("node", [], [NODES[1]])
    assert (first["nodes"], second["nodes"]) == (list(NODES[:3]), [NODES[0], *NODES[2:4]])
    assert first["start"] < first["first_sign"] <= first["end"] <= second["start"]
    assert second["iteration_after"] == 100 and second["checkpoint_before"] >= 5
    verdict = stage.verdict(attempt)
    assert (verdict["reason"], verdict["blamed"], verdict["held"]) == (
        "finished",
        [],
        [stage.array],
    )
    assert stage.queued().excluded == ()  # one killed worker is no proof
    entry = next(
        entry
        for entry in read_journal(stage.directory.journal).entries
        if entry.kind == "launch-failed"
    )
    assert (entry.data["blamed"], entry.data["suspects"]) == ([], [NODES[1]])
    assert stage.attempts() == [attempt]
    told = diagnosed(capsys, 0, "--all")["launches"]
    assert (
        [one["restart"]["answer"] for one in told]
        == [first["restart"], second["restart"]]
        == ["elsewhere", "none"]
    )
    judged = [one["attribution"] for one in told]
    assert [(one["by"], one["blamed"], one["suspects"]) for one in judged] == [
        ("agent", [], [NODES[1]]),
        ("agent", [], []),
    ]


@pytest.mark.parametrize("state", ["FAIL", "DRAIN"])
def test_a_node_that_the_site_takes_out_of_service_is_not_lost(
    stage: SmallRun, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    """Its job runs on: no alarm, and it is not to blame when a worker of another node dies; the
    next launch avoids it.
    """
    stage.launch(3)
    attempt = stage.train()
    taken, struck = NODES[0], NODES[2]  # the first runs the batch script
    change(stage, taken, f"State={state}", "Reason=fan 4")
    try:
        node = next(node for node in stage.slurm.nodes() if node.name == taken)
        assert node.states >= {state.lower()} and not (
            node.is_usable or node.is_gone or node.is_silent
        )
        capsys.readouterr()
        execute(["status", "--json", "--scheduler", "slurm"])
        assert "node-lost" not in {
            one["detector"] for one in json.loads(capsys.readouterr().out)["findings"]
        }
        inject(stage.twin, "worker-crash", node=struck)
        stage.wait(lambda: len(stage.launches(attempt)) == 2, "the second launch")
        first, second = stage.launches(attempt)
        assert (first["blamed"], first["suspects"]) == ([], [struck])
        reached = stage.iteration(attempt)
        stage.wait(lambda: stage.iteration(attempt) > reached + 5, "more steps")
        assert not read_version(stage.directory.exclusions).exclusions
        assert stage.queued().excluded == ()
        # of the four nodes of the allocation the one that stays out is the one with the dead worker
        # or the failing one
        assert NODES[1] in second["nodes"] and NODES[3] in second["nodes"]
    finally:
        change(stage, taken, "State=RESUME")


def site_script(folder: Path, body: str) -> str:
    """A health check of the site's, as a change of the card."""
    path = folder / "fans.sh"
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return f'resilience.check_scripts=["{path}"]'


def test_a_health_script_that_fails_everywhere_costs_no_node_and_no_task(stage: SmallRun) -> None:
    stage.launch(3, site_script(stage.folder, "echo 'fan 3 is slow'; exit 1"))
    attempt = stage.train()
    first, second = stage.launches(attempt)[:2]
    assert (first["cause"], first["blamed"], first["suspects"]) == ("health-check", [], [])
    failed = first["failed_checks"]["script:fans.sh"]
    assert len(failed) >= 2 and set(failed) <= set(first["nodes"]) == set(second["nodes"])
    assert first["failing_checks"] == second["left_out_checks"] == ["script:fans.sh"]
    assert f"{first['failing_because']['script:fans.sh']}: it is not the nodes" == first["summary"]
    assert stage.attempts() == [attempt] and not read_version(stage.directory.exclusions).exclusions
    log = stage.paths.main_log.read_text()
    assert "health check script:fans.sh failed on" in log and "it is not the nodes" in log
    assert "without health check script:fans.sh, which fails everywhere" in log


def test_what_such_a_script_has_excluded_is_taken_back(stage: SmallRun) -> None:
    """On one node at a time it looks like that node's fault, until the next one fails it too."""
    one = ("slurm.nodes=1", "slurm.spare_nodes=0")
    stage.launch(4, *one, site_script(stage.folder, "echo 'fan 3 is slow'; exit 1"))
    second = stage.train(attempt=1)
    first = stage.attempts()[0]
    [blamed] = stage.verdict(first)["blamed"]
    assert stage.launches(second)[0]["cause"] == "health-check"
    assert not read_version(stage.directory.exclusions).exclusions
    stage.wait_for_excluded()
    kinds = [
        (entry.kind, entry.data.get("node"))
        for entry in read_journal(stage.directory.journal).entries
    ]
    assert [kind for kind in kinds if kind[0] in {EXCLUDED, INCLUDED}] == [
        (EXCLUDED, blamed),
        (INCLUDED, blamed),
    ]
    assert (
        f"{blamed} is not excluded any more: health check script:fans.sh"
        in stage.paths.main_log.read_text()
    )
    assert stage.attempts() == [first, second]


def test_a_health_script_that_one_node_fails_still_excludes_it(stage: SmallRun) -> None:
    body = f'[ "$SLURMD_NODENAME" != {NODES[1]} ] || {{ echo "fan 3 is slow"; exit 1; }}'
    stage.launch(3, site_script(stage.folder, body))
    attempt = stage.train()
    first, second = stage.launches(attempt)[:2]
    assert (first["cause"], first["blamed"]) == ("node", [NODES[1]]) and NODES[1] not in second[
        "nodes"
    ]
    stage.wait_for_excluded(NODES[1])


def test_a_black_hole_burns_one_task_and_others_run_elsewhere(
    stage: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    inject(stage.twin, "black-hole", node=NODES[1])
    stage.launch(5, "slurm.spare_nodes=0")
    second = stage.train(attempt=1)
    first = stage.attempts()[0]
    verdict = stage.verdict(first)
    assert (verdict["cause"], verdict["blamed"], verdict["restart"], verdict["exit_status"]) == (
        "node",
        [],
        True,
        1,
    )
    assert [launch["suspects"] for launch in stage.launches(first)] == [[NODES[1]], [NODES[1]]]
    # the second time counts
    assert [launch["avoided"] for launch in stage.launches(first)] == [[], [NODES[1]]]
    [entry] = read_version(stage.directory.exclusions).exclusions
    assert (entry.node, entry.state) == (NODES[1], "avoid")
    assert NODES[1] not in stage.launches(second)[0]["nodes"]
    stage.wait_for_excluded(NODES[1])
    assert stage.queued().pending_tasks == (3, 4, 5)
    found = diagnosed(capsys, 0, "--job", first)
    told = found["attribution"]
    assert (told["by"], told["blamed"], told["suspects"]) == ("agent", [], [NODES[1]])
    # the next task trains already
    assert (found["action"], found["now"]["state"]) == ("none", "trains")
    assert "avoided while enough others are free" in found["explanation"]


def test_bad_data_are_of_one_run_and_a_roll_back_passes_over_them(
    stage: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs train beside each other; the mail's cure for the one whose data are bad lets it go
    on.
    """
    beside = tmp_path / "beside"
    beside.mkdir()
    stage.paths.root.mkdir()
    inject(stage.twin, "bad-sample", path=str(stage.paths.root))
    quick = ("slurm.spare_nodes=0", "rehearsal.step_seconds=40", "checkpoint.interval=5")
    with monkeypatch.context() as patch:
        patch.chdir(beside)
        other = SmallRun(beside, stage.twin)
        other.launch(1, *quick, "run.name=beside")
    stage.launch(3, *quick)
    stage.wait_for_hold()
    stage.wait(
        lambda: not any(job.state is JobState.RUNNING for job in stage.living()),
        "the end of the job",
    )
    [well] = other.attempts()
    assert len(other.launches(well)) == 1 and other.iteration() > 8, "the other run was never ended"
    assert execute(["rollback", "5", "--skip", "8-8", "--yes", "--reason", "bad data"]) == 0
    assert execute(["resume", "--yes", "--reason", "a test"]) == 0
    stage.wait(lambda: stage.iteration() > 10, "steps behind the bad data")
    assert "Skipped iterations 8 to 8" in stage.paths.main_log.read_text()
    assert 8 not in {step["iteration"] for step in stage.steps()}


def test_a_fault_that_follows_the_rank_blames_no_node(
    stage: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank dies of SIGSEGV at one iteration, on whatever node it is: two tasks see that, and no
    node is lost.
    """
    stage.paths.root.mkdir()
    inject(stage.twin, "bad-sample", path=str(stage.paths.root))
    # 0.4 s each: the rank dies before the next step is done
    stage.launch(5, "slurm.spare_nodes=0", "rehearsal.step_seconds=40")
    stage.wait_for_hold()
    first, second = stage.attempts()
    stage.wait_for_verdict(second)
    [zero, one], [two] = stage.launches(first), stage.launches(second)
    assert (zero["cause"], zero["suspects"], zero["fault"]) == (
        "node",
        one["avoided"],
        two["fault"],
    )
    assert (one["cause"], one["reached"], one["fault"]) == ("node", 7, two["fault"])
    assert (two["cause"], two["blamed"], two["suspects"] == one["avoided"]) == (
        "software",
        [],
        False,
    )
    assert [launch["restart"] for launch in (zero, one, two)] == [
        "elsewhere",
        "elsewhere",
        "change",
    ]
    assert stage.verdict(second)["held"] == [stage.array] and stage.queued().pending_tasks == (
        3,
        4,
        5,
    )
    said = f"after iteration 7 again, as on {one['avoided'][0]}"
    assert said in stage.verdict(second)["message"]
    assert stage.queued().excluded == ()
    assert not read_version(stage.directory.exclusions).exclusions
    kinds = [
        (entry.kind, entry.data.get("node"))
        for entry in read_journal(stage.directory.journal).entries
    ]
    assert [kind for kind in kinds if kind[0] in {EXCLUDED, INCLUDED}] == [
        (EXCLUDED, one["avoided"][0]), (INCLUDED, one["avoided"][0]),
    ]  # fmt: skip

    def is_told() -> bool:  # what is said while the job is still about to leave is another matter
        capsys.readouterr()
        execute(["status", "--scheduler", "slurm"])
        said = " ".join(capsys.readouterr().out.split())
        return "software or data, not the nodes" in said

    stage.wait(is_told, "the cause on the screen")


def test_a_taken_port_is_told_by_the_rank_that_wanted_it(
    stage: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """All nodes of the twin share one address: whoever holds the port holds it on each of them."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stage.launch(3, f"slurm.master_port={port}")
        stage.wait_for_hold()
    [attempt] = stage.attempts()
    stage.wait_for_verdict(attempt)
    first, second = stage.launches(attempt)
    assert [(one["cause"], one["suspects"], one["fault"]) for one in (first, second)] == [
        ("port", [NODES[0]], f"port {port} taken"), ("port", [NODES[1]], f"port {port} taken"),
    ]  # fmt: skip
    assert second["nodes"] == list(NODES[1:4])  # rank 0 was tried on another node
    verdict = stage.verdict(attempt)
    process = psutil.Process()
    assert (
        f"port {port} of {NODES[1]} is held by process {process.pid} ({process.name()})"
        in verdict["message"]
    )
    assert "remove slurm.master_port from the card" in verdict["message"]
    assert stage.queued().excluded == () and stage.queued().pending_tasks == (2, 3)
    found = diagnosed(capsys, 1, "--job", attempt)
    assert (found["attribution"]["kind"], found["verdict"]) == ("port", "rendezvous")


def test_a_node_that_alone_cannot_save_is_left_for_the_spare(
    stage: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.launch(2, "batch.train_samples=1200")
    attempt = stage.train()
    inject(stage.twin, "save-error", node=NODES[1])
    stage.wait_for_verdict(attempt)
    first, second = stage.launches(attempt)
    assert (first["cause"], first["blamed"]) == ("node", [NODES[1]])
    assert f"{NODES[1]} alone could not write the save of step" in first["summary"]
    assert (
        "to which 2 other nodes wrote" in first["summary"]
        and "Input/output error" in first["summary"]
    )
    assert second["nodes"] == [NODES[0], *NODES[2:4]]
    assert stage.verdict(attempt)["reason"] == "finished"
    log = stage.paths.main_log.read_text()
    # named after the first
    assert f"tr11: WARNING: {NODES[1]} alone could not write the save" in log
    assert log.count("SAVE FAILED") == 2
    found = diagnosed(capsys, 0, "--all")["launches"][0]
    # it is excluded, and the next launch has finished
    assert (found["attribution"]["blamed"], found["action"]) == ([NODES[1]], "none")


def test_batch_scripts_killed_before_their_agents_burn_two(stage: SmallRun) -> None:
    stage.launch(5, 'slurm.setup=["sleep 3000"]')
    [submission] = stage.directory.submissions.iterdir()
    for count in (1, 2):
        marks = submission / "agent-silent"
        stage.wait(lambda count=count, marks=marks: len(list(marks.glob("*"))) == count, "the mark")  # type: ignore[misc]
        inject(stage.twin, "batch-killed")
    stage.wait_for_hold()
    [third] = stage.attempts()
    stage.wait_for_verdict(third)
    assert stage.verdict(third)["message"] == "2 tasks ended before their agents began"
    assert stage.verdict(third)["held"] == [stage.array] and stage.queued().pending_tasks == (4, 5)


def test_bad_input_holds_the_array(stage: SmallRun) -> None:
    inject(stage.twin, "partition-down")  # no task starts before the checkpoint is there
    stage.launch(3)
    write_checkpoint(stage.paths.checkpoints, 5)  # a real training's, which a stand-in refuses
    heal(stage.twin, kind="partition-down")
    stage.wait(
        lambda: (
            stage.attempts()
            and (stage.paths.attempt(stage.attempts()[0]) / "verdict.json").exists()
        ),
        "the end",
    )
    [attempt] = stage.attempts()
    verdict = stage.verdict(attempt)
    assert (verdict["reason"], verdict["exit_status"], verdict["restart"]) == ("refused", 2, False)
    assert (verdict["held"], len(stage.launches(attempt))) == ([stage.array], 1)
    stage.wait_for_hold()
    assert stage.queued().pending_tasks == (2, 3)
    assert "ALERT" in stage.paths.main_log.read_text()
    [held] = [
        entry
        for entry in read_journal(stage.directory.journal).entries
        if entry.kind == "array-held"
    ]
    assert held.data["jobs"] == [stage.array]


def test_ten_queued_tasks_never_start_once_the_switch_is_set(stage: SmallRun) -> None:
    stage.launch(11)
    attempt = stage.train()
    stage.directory.kill_switch.touch()  # by anyone who may write there
    stage.wait_for_verdict(attempt)
    verdict = stage.verdict(attempt)
    assert (verdict["reason"], verdict["exit_status"], verdict["held"]) == (
        "kill-switch",
        0,
        [stage.array],
    )
    stage.wait_for_hold()
    assert stage.queued().pending_tasks == tuple(range(2, 12))
    # One that is let go by mistake holds the rest again, and leaves.
    stage.slurm.release(stage.array)
    stage.wait(
        lambda: (
            len(stage.attempts()) == 2
            and (stage.paths.attempt(stage.attempts()[1]) / "verdict.json").exists()
        ),
        "task 2",
    )
    second = stage.attempts()[1]
    assert (stage.verdict(second)["reason"], stage.launches(second)) == ("kill-switch", [])
    stage.wait_for_hold()
    assert stage.queued().pending_tasks == tuple(range(3, 12))


def test_a_dead_node_costs_neither_the_job_nor_the_next_task(stage: SmallRun) -> None:
    stage.launch(3)
    attempt = stage.train()
    inject(stage.twin, "node-dead", node=NODES[2])
    stage.wait(lambda: len(stage.launches(attempt)) == 2, "the second launch")
    first, second = stage.launches(attempt)
    assert (first["cause"], first["blamed"], second["nodes"]) == (
        "node",
        [NODES[2]],
        [NODES[0], NODES[1], NODES[3]],
    )
    reached = stage.iteration(attempt)
    stage.wait(
        lambda: (
            next(node for node in stage.slurm.nodes() if node.name == NODES[2]).states & {"down"}
        ),
        "Slurm's notice",
    )
    stage.wait(lambda: stage.iteration(attempt) > reached + 20, "more steps")
    # Slurm takes a job that lost a node for ended, and starts the next task of the array beside it,
    # if it is faster than the controller: that one does not train, and goes back into the queue.
    beside = stage.attempts()[1:]
    for other in beside:
        stage.wait_for_verdict(other)
    assert [(stage.launches(other), stage.verdict(other)["reason"]) for other in beside] in (
        [],
        [([], "superseded")],
    )
    stage.wait(lambda: stage.pending_tasks() == {2, 3}, "tasks 2 and 3 in the queue")


def test_a_task_that_was_given_excluded_nodes_leaves_them_alone(stage: SmallRun) -> None:
    block = stage.take_nodes(6)
    stage.launch(3)
    for node in NODES[:2]:  # as an attempt does whose scheduler did not answer
        assert exclude(stage.directory, node, why="a test", owner="test", days=1)
    stage.slurm.hold(stage.array)  # else it starts on whichever nodes the other job leaves first
    stage.slurm.cancel(block)
    stage.wait(
        lambda: all(node.states == {"idle"} for node in stage.slurm.nodes()),
        "the other job's end on all nodes",
    )
    stage.slurm.release(stage.array)
    second = stage.train(attempt=1)
    first = stage.attempts()[0]
    assert (stage.launches(first), stage.verdict(first)["cause"]) == ([], "node")
    assert stage.launches(second)[0]["nodes"] == list(NODES[2:5])
    stage.wait_for_excluded(*NODES[:2])


def test_the_next_task_ends_a_job_without_its_batch_host(stage: SmallRun) -> None:
    stage.launch(4)
    first = stage.train(beyond=10)
    inject(stage.twin, "batch-host-dead", node=NODES[0])
    second = stage.train(attempt=1)
    assert NODES[0] not in stage.launches(second)[0]["nodes"]
    assert stage.launches(second)[0]["checkpoint_before"] >= 10
    stage.wait(
        lambda: next(job for job in stage.jobs() if job.raw_id == first).state.is_final,
        "the end of the zombie",
    )
    stage.wait(lambda: stage.iteration(second) > stage.iteration(first) + 20, "more steps")
    assert stage.attempts() == [first, second]
    assert stage.queued().pending_tasks == (3, 4)


def test_a_dead_spare_is_named_and_excluded_and_burns_no_task(stage: SmallRun) -> None:
    """Slurm takes a job that lost a node for ended, also where that node trained nothing, and
    starts the next task.
    """
    stage.launch(4)
    attempt = stage.train()
    inject(stage.twin, "node-dead", node=NODES[3])
    stage.wait(
        lambda: (
            NODES[3] in {one.node for one in read_version(stage.directory.exclusions).exclusions}
        ),
        "its end",
    )
    reached = stage.iteration(attempt)
    stage.wait(lambda: stage.iteration(attempt) > reached + 20, "more steps")
    assert f"{NODES[3]} has left the job" in stage.paths.main_log.read_text()
    assert len(stage.launches(attempt)) == 1
    stage.wait(lambda: waiting_behind(stage, attempt) == {2, 3, 4}, "the queue behind the job")
    stage.slurm.signal(attempt, "USR1")
    stage.wait_for_verdict(attempt)
    stage.wait(lambda: running_task(stage) in {2, 3, 4}, "the next task")
    second = stage.running().raw_id
    stage.wait(lambda: stage.iteration(second) > reached + 20, "its steps")
    waiting = {
        task
        for job in stage.jobs()
        if job.state is JobState.PENDING
        for task in job.pending_tasks or (job.task_id,)
    }
    assert waiting | {running_task(stage)} == {2, 3, 4}
    assert NODES[3] not in stage.launches(second)[0]["nodes"]


def running_task(stage: SmallRun) -> int | None:
    return next((job.task_id for job in stage.jobs() if job.state is JobState.RUNNING), None)


def waiting_behind(stage: SmallRun, attempt: str) -> set[int | None]:
    """The tasks that wait for the end of this attempt."""
    waiting = [
        job
        for job in stage.jobs()
        if job.state is JobState.PENDING and f"afterany:{attempt}" in job.dependency
    ]
    return {task for job in waiting for task in job.pending_tasks or (job.task_id,)}


def test_a_job_whose_batch_host_slurm_has_lost_starts_nothing_more(stage: SmallRun) -> None:
    """Its slurmd alone has died: the agent lives, and so may the trainers, in a job that nothing
    ends any more.
    """
    stage.launch(4)
    first = stage.train(beyond=10)
    inject(stage.twin, "half-dead", node=NODES[0])
    second = stage.train(attempt=1)
    stage.wait_for_verdict(first)
    stage.wait(
        lambda: next(job for job in stage.jobs() if job.raw_id == first).state.is_final,
        "the end of the job",
    )
    named = {
        node
        for one in (first, second)
        for launch in stage.launches(one)
        for node in launch["suspects"]
    }
    assert (len(stage.launches(first)), named - {NODES[0]}) == (1, set())
    assert {one.node for one in read_version(stage.directory.exclusions).exclusions} <= {NODES[0]}
    assert NODES[0] not in stage.launches(second)[0]["nodes"]
    assert stage.launches(second)[0]["checkpoint_before"] >= 10
    assert stage.attempts() == [first, second] and stage.verdict(first)["restart"]
    assert stage.queued().pending_tasks == (3, 4)


def test_a_job_without_its_batch_host_is_never_called_healthy(
    stage: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its trainers are silent for long enough to be gone, it is no job that goes on by
    itself.
    """
    stage.launch(1)
    attempt = stage.train()
    inject(stage.twin, "batch-host-dead", node=NODES[0])

    def has_left() -> bool:
        job = stage.slurm.job(attempt)
        return job is not None and NODES[0] not in job.nodes

    stage.wait(has_left, "Slurm's notice")
    capsys.readouterr()
    assert execute(["status", "--json", "--scheduler", "slurm"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["may_sleep"]) == ("stalled", False)
    assert (
        f"has lost {NODES[0]}, which ran its batch script" in document["why"]
        or "without its batch script" in document["why"]
    )

"""Faults on demand, on a real Slurm: each is really there, is seen by others, and is gone after
healing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, strategies as st

from tests.plugins.command_server import tr11_command
from tests.plugins.twin_fixture import require_slurm
from tests.waiting import PATIENCE_SECONDS, until
from tr11ops.base.errors import TwinError
from tr11ops.cli.main import execute
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.twin.fault_effects import FOREIGN_REASON
from tr11ops.twin.fault_files import CORE_DUMP, _listing, check_directory
from tr11ops.twin.fault_kinds import KINDS, find_kind
from tr11ops.twin.fault_store import FaultStore, InjectedFault, new_fault
from tr11ops.twin.faults import _target, active, heal, inject
from tr11ops.twin.plan import TwinFolders, TwinPlan
from tr11ops.twin.processes import NodeContents, NodeProcess, ProcessRecord, StepWatch, scan
from tr11ops.twin.twin import Twin
from trainer.contract.documents import document, record_of

PLAN = TwinPlan(
    name="faults", nodes=4, gpus=0, cpu_nodes=0, slurmd_timeout_seconds=5, kill_wait_seconds=2,
    message_timeout_seconds=5,
)  # fmt: skip
ONE, TWO, THREE, FOUR = PLAN.node_names
JOB = """#!/bin/bash
#SBATCH --no-requeue
srun --nodes=3 bash -c 'RANK=$SLURM_PROCID exec sleep 3000'
echo "the step ended with $?"
sleep 3000
"""


def test_without_a_name_the_fault_befalls_the_training_not_a_periodic_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = (ProcessRecord("job", "job", pid, pid, "") for pid in (1, 2))
    daemon = NodeProcess(one, parent=0, step=None, rank=None)
    worker = NodeProcess(two, parent=1, step="0", rank=0)
    busy = {
        ONE: NodeContents(daemons=(daemon,), tasks=(worker,)),
        FOUR: NodeContents(daemons=(daemon,)),
    }
    there = {name: busy.get(name, NodeContents()) for name in PLAN.node_names}
    monkeypatch.setattr("tr11ops.twin.faults.scan", lambda folders, names: there)
    none = SimpleNamespace(active=tuple)
    twin = cast(Twin, SimpleNamespace(plan=PLAN, folders=None, faults=none))
    for kind in ("worker-crash", "step-hang", "node-dead"):
        assert _target(twin, find_kind(kind), None, None) == ONE
    there[ONE] = NodeContents()
    assert _target(twin, find_kind("node-dead"), None, None) == FOUR, "the only busy one"


@pytest.fixture(scope="module")
def broken_twin(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    with Twin.up(PLAN, twin_home) as running:
        yield running


@pytest.fixture
def here(broken_twin: Twin) -> Iterator[Twin]:
    """The twin of this module, whole again after each test."""
    yield broken_twin
    assert not [healing.error for healing in heal(broken_twin) if healing.error]
    slurm = SlurmScheduler(broken_twin.environment)
    for job in slurm.jobs():
        if not job.state.is_final:
            slurm.cancel(job.raw_id)
    until(lambda: all_idle(broken_twin), "all nodes idle")


def all_idle(twin: Twin) -> bool:
    """Whether they are; those set aside are resumed, which may fail: their state can change before
    it is asked for.
    """
    states = twin.node_states() or {"": ""}
    for name in [name for name, state in states.items() if "drain" in state or "fail" in state]:
        client(twin, "scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
    return set(states.values()) == {"idle"}


def client(twin: Twin, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        words,
        env={**os.environ, **twin.environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def tr11(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*tr11_command(), *words], env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


def start_job(twin: Twin, folder: Path) -> str:
    """A job whose batch script runs on the first node and whose step has a worker on each of the
    first three.
    """
    number = SlurmScheduler(twin.environment).submit(
        BatchRequest(JOB, "victim", 3, 3600, str(folder / "out.txt"), folder, exclude=(FOUR,))
    )
    until(
        lambda: sum(len(contents(twin, name).workers) for name in (ONE, TWO, THREE)) == 3,
        "three workers",
    )
    return str(number)


def contents(twin: Twin, node: str) -> NodeContents:
    return scan(twin.folders, [node])[node]


def state_of(record: ProcessRecord) -> str:
    """The kernel's letter for a process: S sleeping, T stopped; X when it is gone."""
    try:
        text = Path(f"/proc/{record.pid}/stat").read_text()
    except OSError:
        return "X"
    return text[text.rindex(")") + 2]


# ----------------------------------------------------------------------------- without Slurm
def test_an_unknown_kind_is_told_the_nearest_one_and_all() -> None:
    with pytest.raises(
        TwinError, match=r"did you mean node-dead\? there are worker-crash, .*read-only"
    ):
        find_kind("node_dead")


@given(st.text(max_size=40))
def test_a_hostile_kind_or_directory_is_one_line(text: str) -> None:
    folders = TwinFolders(Path("/var/lib/tr11/twin/none"))
    for ask in (lambda: find_kind(text), lambda: check_directory(text, folders)):
        with contextlib.suppress(TwinError):
            assert str(ask())


@pytest.mark.parametrize(
    "path", ["/", "/etc", "/tmp/..", "relative", "/no/such/place", "/dev/null", "", "/tmp\0x"]
)
def test_directories_that_more_depends_on_are_refused(path: str) -> None:
    with pytest.raises(TwinError, match="--path"):
        check_directory(path, TwinFolders(Path("/var/lib/tr11/twin/none")))


def test_the_twins_own_folder_cannot_be_broken(tmp_path: Path) -> None:
    root = tmp_path / "home" / "name"
    (root / "logs").mkdir(parents=True)
    for path in (root, root / "logs", tmp_path):
        with pytest.raises(TwinError, match="the twin itself"):
            check_directory(str(path), TwinFolders(root))


@given(
    kind=st.sampled_from(sorted(KINDS)), target=st.text(min_size=1, max_size=300),
    seconds=st.none() | st.floats(1, 1e6), details=st.dictionaries(st.text(max_size=5), st.text(max_size=5)),
)  # fmt: skip
def test_a_record_survives_its_file(
    kind: str, target: str, seconds: float | None, details: dict[str, str]
) -> None:
    from msgspec.structs import replace

    fault = replace(
        new_fault(kind, target, seconds),
        details=details,
        processes=(ProcessRecord("a", "b", 1, 2, "c"),),
    )
    assert record_of(InjectedFault, json.loads(json.dumps(document(fault)))) == fault
    assert "/" not in fault.key and len(fault.key) < 200


# ----------------------------------------------------------------------------- workers
def test_one_worker_crashes_or_stops(here: Twin, tmp_path: Path) -> None:
    start_job(here, tmp_path)
    [worker] = contents(here, TWO).workers
    assert (worker.rank, worker.step) == (1, "0")
    stopped = inject(here, "worker-stop", node=TWO)
    until(lambda: state_of(worker.record) == "T", "the worker is stopped")
    assert inject(here, "worker-stop", node=TWO).was_there
    assert [fault.key for fault in active(here)] == [stopped.fault.key]
    heal(here)
    until(lambda: state_of(worker.record) == "S", "the worker sleeps again")

    crashed = inject(here, "worker-crash", node=THREE).fault
    assert [record.name for record in crashed.processes] == [THREE]
    until(
        lambda: f"srun: error: {THREE}: task 2: Killed" in (tmp_path / "out.txt").read_text(),
        "srun names the node",
    )
    assert active(here) == () and worker.record.is_alive
    with pytest.raises(TwinError, match=f"worker-crash on {FOUR}: no job runs there"):
        inject(here, "worker-crash", node=FOUR)


# ----------------------------------------------------------------------------- nodes
def test_a_black_hole_swallows_steps_but_not_the_batch_script(here: Twin, tmp_path: Path) -> None:
    start_job(here, tmp_path)
    inject(here, "black-hole", node=ONE)  # the batch host: its script must see what happens
    until(
        lambda: f"{ONE}: task 0: Aborted" in (tmp_path / "out.txt").read_text(),
        "the running step dies",
    )
    assert contents(here, ONE).is_batch_host
    assert contents(here, TWO).workers
    inject(here, "black-hole", node=FOUR)
    for _ in range(3):
        done = client(here, "srun", f"--nodelist={FOUR}", "sleep", "60", check=False)
        assert done.returncode == 134 and f"{FOUR}: task 0: Aborted" in done.stderr
    assert [fault.target for fault in active(here)] == [ONE, FOUR]
    heal(here, target=FOUR)
    assert client(here, "srun", f"--nodelist={FOUR}", "echo", "alive").stdout == "alive\n"
    assert [fault.target for fault in active(here)] == [ONE]


def test_a_slow_node_runs_and_stops_in_turns(here: Twin, tmp_path: Path) -> None:
    start_job(here, tmp_path)
    [slow], [fast] = contents(here, TWO).workers, contents(here, THREE).workers
    inject(here, "slow-node", node=TWO)
    for wanted in "TSTS":
        until(lambda wanted=wanted: state_of(slow.record) == wanted, f"state {wanted}")  # type: ignore[misc]
    assert state_of(fast.record) == "S"
    [fault] = active(here)
    assert fault.agent is not None
    os.kill(fault.agent.pid, signal.SIGKILL)  # what keeps it up dies in mid-work
    until(lambda: active(here)[0].is_lost, "the agent is gone")
    heal(here)
    assert state_of(slow.record) == "S"


def test_a_half_dead_node_keeps_its_tasks(here: Twin, tmp_path: Path) -> None:
    with pytest.raises(TwinError, match="no job runs there"):
        inject(here, "half-dead", node=FOUR)
    assert active(here) == ()
    start_job(here, tmp_path)
    fault = inject(here, "half-dead").fault
    assert fault.target == THREE, "the last node with a job"
    assert not here.process(THREE).is_alive
    assert contents(here, THREE).daemons and contents(here, THREE).workers
    heal(here)
    assert here.process(THREE).is_alive and contents(here, THREE).workers


def test_a_dead_node_leaves_nothing_and_comes_back(here: Twin, tmp_path: Path) -> None:
    number = start_job(here, tmp_path)
    before = [process.record for process in contents(here, TWO).all]
    assert len(before) >= 2
    inject(here, "node-dead", node=TWO)
    inject(here, "slurmd-killed", node=TWO)
    assert not any(record.is_alive for record in before) and not here.process(TWO).is_alive
    until(lambda: "down" in (here.node_states() or {}).get(TWO, ""), "the controller has noticed")
    until(
        lambda: (job := SlurmScheduler(here.environment).job(number)) and not job.state.is_active,
        "the job is over",
    )
    assert "NODE_FAIL" in client(here, "scontrol", "show", "job", number).stdout
    [first] = heal(here, kind="slurmd-killed")
    assert "stays dead: node-dead" in first.text and not here.process(TWO).is_alive
    heal(here)
    until(lambda: (here.node_states() or {}).get(TWO) == "idle", "the node is back")


def test_the_batch_host_dies_by_itself(here: Twin, tmp_path: Path) -> None:
    start_job(here, tmp_path)
    with pytest.raises(TwinError, match="no job's batch script runs there"):
        inject(here, "batch-host-dead", node=TWO)
    assert inject(here, "batch-host-dead").fault.target == ONE
    assert (
        contents(here, ONE).all == ()
        and not here.process(ONE).is_alive
        and here.process(TWO).is_alive
    )


# ----------------------------------------------------------------------------- the controller
def test_a_frozen_controller_thaws_after_its_command_has_ended(here: Twin) -> None:
    done = tr11(
        "twin",
        "fault",
        "controller-frozen",
        "--for",
        "12",
        "--name",
        "faults",
        "--dir",
        str(_home(here)),
    )
    assert done.returncode == 0 and "heals by itself in 12 s" in done.stderr
    [fault] = active(here)
    assert (
        state_of(here.process("slurmctld")) == "T"
        and fault.agent is not None
        and fault.agent.is_alive
    )
    until(lambda: active(here) == (), "healed by its agent")
    assert state_of(here.process("slurmctld")) != "T"
    assert here.node_states() is not None
    until(lambda: fault.agent is not None and not fault.agent.is_alive, "the agent has ended")


def test_a_killed_and_a_restarted_controller_keep_the_job(here: Twin, tmp_path: Path) -> None:
    number, now = start_job(here, tmp_path), time.time()
    # what a controller has not yet written down is lost when it is killed
    until(
        lambda: (here.folders.state / "job_state").stat().st_mtime > now,
        "the controller has saved its state",
    )
    first = here.process("slurmctld")
    inject(here, "controller-killed")
    assert not first.is_alive and client(here, "sinfo", check=False).returncode == 1
    heal(here)
    inject(here, "controller-restarted")
    until(lambda: here.node_states() is not None, "the controller answers")
    assert here.process("slurmctld").pid != first.pid and active(here) == ()
    job = SlurmScheduler(here.environment).job(number)
    assert job is not None and job.state.is_active and len(contents(here, TWO).workers) == 1


# ----------------------------------------------------------------------------- other hands
@pytest.mark.parametrize(("kind", "state"), [("drain", "DRAIN"), ("node-failing", "FAIL")])
def test_what_a_site_does_to_a_node_is_undone_only_while_its_reason_stands(
    here: Twin, kind: str, state: str
) -> None:
    inject(here, kind, node=TWO)
    inject(here, kind, node=THREE, reason="fan 4 broken (site)")
    reasons = client(here, "sinfo", "--noheader", "--list-reasons", "--format=%N|%E").stdout
    assert f"{TWO}|{FOREIGN_REASON}" in reasons and f"{THREE}|fan 4 broken (site)" in reasons
    client(here, "scontrol", "update", f"NodeName={THREE}", f"State={state}", "Reason=someone else")
    texts = {healing.fault.target: healing.text for healing in heal(here)}
    assert texts == {
        TWO: f"{TWO} is resumed",
        THREE: f"{THREE} stays in {state}: the reason is another one now (someone else)",
    }
    with pytest.raises(TwinError, match=f"{state}.* already"):
        inject(here, kind, node=THREE)
    client(here, "scontrol", "update", f"NodeName={THREE}", "State=RESUME")


def test_what_runs_on_a_failing_node_goes_on(here: Twin, tmp_path: Path) -> None:
    number = start_job(here, tmp_path)
    inject(here, "node-failing", node=TWO)
    said = client(here, "sinfo", "--noheader", f"--nodes={TWO}", "--format=%T").stdout.strip()
    assert said in {"fail", "failing"}  # before Slurm 26.05 and since
    job = SlurmScheduler(here.environment).job(number)
    assert job is not None and job.state.is_active and len(contents(here, TWO).workers) == 1


def test_a_running_job_is_left_less_than_two_minutes(here: Twin, tmp_path: Path) -> None:
    number = start_job(here, tmp_path)
    assert inject(here, "job-limit-lowered").fault.target == ONE
    left = client(here, "squeue", "--noheader", f"--jobs={number}", "--format=%L").stdout.strip()
    minutes, seconds = left.split(":")
    assert 0 < 60 * int(minutes) + int(seconds) <= 120
    assert active(here) == ()
    with pytest.raises(TwinError, match="no job's batch script runs there"):
        inject(here, "job-limit-lowered", node=TWO)


def test_a_full_and_a_read_only_directory(here: Twin, tmp_path: Path) -> None:
    """Really so where this user may mount; else one clear refusal, and nothing is left."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "old").write_text("old")
    (run / "large").write_bytes(bytes(8192))
    try:
        inject(here, "disk-full", path=str(run))
    except TwinError as error:
        assert "needs the right to mount" in str(error) and active(here) == ()
        return
    with pytest.raises(OSError, match="No space left"):
        (run / "new").write_text("new")
    assert (run / "old").read_text() == "old"
    dump = run / CORE_DUMP  # `du` shows it, and it is nothing of the run's
    shown = subprocess.run(["du", "-xhd", "2", str(run)], capture_output=True, text=True).stdout
    assert dump.stat().st_size > 8 << 20 and f"16M\t{dump.parent}\n" in shown
    (run / "large").unlink()  # what is removed is room, and is gone afterwards too
    (run / "new").write_text("it fits now")
    with pytest.raises(TwinError, match="mounted there already"):
        inject(here, "read-only", path=str(run))
    heal(here)
    assert (run / "new").read_text() == "it fits now" and not (run / "large").exists()
    assert not dump.parent.exists(), "it was the fault's own"
    (run / "old").write_text("changed")
    inject(here, "read-only", path=str(run), seconds=3600)
    with pytest.raises(OSError, match="Read-only"):
        (run / "old").write_text("again")
    assert inject(here, "read-only", path=str(run)).was_there
    heal(here)
    (run / "new").write_text("new")
    assert (run / "old").read_text() == "changed" and not os.path.ismount(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="it needs the right to mount")
def test_a_node_has_its_own_full_shared_memory_until_it_is_healed(here: Twin) -> None:
    """What starts there sees it; another node, and this machine, keep theirs."""

    def free(node: str) -> int:
        room = client(here, "srun", f"--nodelist={node}", "df", "--output=avail", "/dev/shm")
        return int(room.stdout.split()[-1])

    inject(here, "shm-full", node=TWO)
    until(lambda: (here.node_states() or {}).get(TWO) == "idle", f"{TWO} is back")
    assert free(TWO) == 0 < free(ONE)
    assert not Path("/dev/shm/of-another").exists()
    heal(here)
    until(lambda: free(TWO) > 0, "the machine's own")


def test_taking_the_twin_down_uncovers_what_it_laid_over(twin_home: Path, tmp_path: Path) -> None:
    require_slurm()
    run = tmp_path / "run"
    run.mkdir()
    with Twin.up(TwinPlan(name="cover", nodes=1, gpus=0, cpu_nodes=0), twin_home) as twin:
        with contextlib.suppress(
            TwinError
        ):  # where this user may not mount, nothing is laid over it
            inject(twin, "read-only", path=str(run), seconds=3600)
        agents = [fault.agent for fault in active(twin)]
    (run / "new").write_text("new")
    assert not any(agent is not None and agent.is_alive for agent in agents)
    assert not twin.folders.root.exists()


# ------------------------------------------------------------------------- crashes, and the command
def test_what_a_crashed_injector_left_is_healed(here: Twin, tmp_path: Path) -> None:
    """The process that breaks the node is killed when everything is stopped and nothing is killed
    yet.
    """
    start_job(here, tmp_path)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom tr11ops.twin import fault_effects\n"
        "from tr11ops.twin.faults import inject\nfrom tr11ops.twin.twin import Twin\n"
        "fault_effects.kill = lambda records: os.kill(os.getpid(), 9)\n"
        "inject(Twin.find('faults', Path(sys.argv[1])), 'node-dead', node=sys.argv[2])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(_home(here)), TWO], env={**os.environ}, cwd=Path.cwd()
    )
    assert done.returncode == -signal.SIGKILL
    [fault] = active(here)
    assert not fault.is_complete and {state_of(record) for record in fault.processes} == {"T"}
    shown = tr11("twin", "status", "--name", "faults", "--dir", str(_home(here)))
    assert f"node-dead on {TWO}" in shown.stdout and "half done" in shown.stdout
    heal(here)
    assert not any(record.is_alive for record in fault.processes) and here.process(TWO).is_alive


def test_a_failed_break_leaves_nothing(here: Twin) -> None:
    inject(here, "controller-killed")
    with pytest.raises(TwinError, match="scontrol"):
        inject(here, "drain", node=TWO)
    kinds = [fault.kind for fault in active(here)]
    assert "controller-killed" in kinds
    heal(here)
    until(lambda: here.node_states() is not None, "the controller answers")
    heal(here)
    assert active(here) == ()


def test_the_command(here: Twin, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--name", "faults", "--dir", str(_home(here))]
    listed = tr11("twin", "fault")
    assert listed.returncode == 0 and all(kind in listed.stdout for kind in KINDS)
    for words, text in (
        (["node-ded", "--node", TWO], "did you mean node-dead?"),
        (["node-dead", "--node", "../../etc"], "is not a node of this twin"),
        (["node-dead", "--node", "jean-zay-iam9"], "did you mean jean-zay-iam0"),
        (["node-dead", "--node", "a b;rm"], "is not a list of nodes"),
        (["drain", "--node", TWO, "--for", "-1"], "'--for': -1 is no length of time"),
        (["drain", "--node", TWO, "--reason", 'a"b'], "--reason"),
        (["drain", "--node", TWO, "--path", "/tmp/x"], "leave --path out"),
        (["disk-full"], "name it with --path"),
        (["controller-frozen", "--node", TWO], "leave --node out"),
        (["worker-crash", "--for", "3"], "leave --for out"),
        (["worker-stop"], "no job runs on the twin"),
    ):
        capsys.readouterr()
        code = execute(["twin", "fault", *words, *place])
        said = capsys.readouterr().err
        assert code in {1, 2} and text in said and len(said.splitlines()) == 1, said
    assert active(here) == ()
    two = tr11("twin", "fault", "slurmd-killed", "--node", "jean-zay-iam[02-03]", "--json", *place)
    assert [fault["target"] for fault in json.loads(two.stdout)["faults"]] == [TWO, THREE]
    status = tr11("twin", "status", "--json", *place)
    assert [fault["kind"] for fault in json.loads(status.stdout)["faults"]] == ["slurmd-killed"] * 2
    healed = tr11("twin", "heal", "--json", *place)
    assert healed.returncode == 0 and {
        row["target"] for row in json.loads(healed.stdout)["healed"]
    } == {TWO, THREE}
    assert "nothing was broken" in tr11("twin", "heal", *place).stderr
    events = [
        json.loads(line) for line in FaultStore(here.folders).history.read_text().splitlines()
    ]
    assert [event["event"] for event in events[-4:]] == ["broken", "broken", "healed", "healed"]


def test_a_watch_sees_only_tasks_of_its_node(here: Twin, tmp_path: Path) -> None:
    watch = StepWatch(here.folders, ONE)
    assert watch.look() == ()
    start_job(here, tmp_path)
    [worker] = contents(here, ONE).workers
    until(
        lambda: [record.pid for record in watch.look()] == [worker.record.pid],
        "the task, and not the batch script",
    )


def _home(twin: Twin) -> Path:
    return twin.folders.root.parent


# ---------------------------------------------------------------------------
# What is noted of a directory before a fault lies over it, while a run writes there.


def test_a_folder_that_goes_away_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that ends renames its folder between the look at its parent and the look into it."""
    (tmp_path / "checkpoints" / ".partial").mkdir(parents=True)
    (tmp_path / "log").write_text("x")
    (tmp_path / "latest").symlink_to("checkpoints")
    scandir = os.scandir

    def renamed(path: str | Path) -> object:
        if Path(path).name == ".partial":
            Path(path).rename(tmp_path / "checkpoints" / "global_step5")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", renamed)
    assert set(_listing(tmp_path)) == {"log", "latest"}
    monkeypatch.undo()
    (tmp_path / "checkpoints" / "global_step5" / "weights").write_text("w")
    assert set(_listing(tmp_path)) == {"log", "latest", "checkpoints/global_step5/weights"}

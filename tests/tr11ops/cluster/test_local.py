"""The embedded scheduler where no Slurm compares: crashes, races, escapes, its simulated nodes and
its memory.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from tests.waiting import PATIENCE_SECONDS, is_gone, until
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.cluster.local import LocalScheduler, LocalSettings
from tr11ops.cluster.local_machine import machine_name
from tr11ops.cluster.local_processes import with_environment
from tr11ops.cluster.local_records import simulated_nodes

ROOT = Path(__file__).parents[3]


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    local = LocalScheduler(
        tmp_path / "state", LocalSettings(nodes=simulated_nodes(4), kill_wait_seconds=2.0)
    )
    try:
        yield local
    finally:
        for job in local.jobs():
            if not job.state.is_final:
                local.cancel(job.array_id or job.job_id)
        until(lambda: not supervisors(local), "all supervisors have gone")
        assert with_environment({"TR11_LOCAL_SCHEDULER": str(local.store.folder)}) == []


def request(scheduler: LocalScheduler, body: str, **changes: object) -> BatchRequest:
    plain = BatchRequest(
        script="#!/bin/bash\n" + body + "\n",
        name="local",
        nodes=1,
        time_limit_seconds=600,
        output="job-%j.txt",
        working_directory=scheduler.store.folder.parent,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def ended(scheduler: LocalScheduler, job_id: str) -> Job:
    def is_over() -> bool:
        job = scheduler.job(job_id)
        return job is not None and job.state.is_final

    until(is_over, f"{job_id} has ended")
    job = scheduler.job(job_id)
    assert job is not None
    return job


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def read_number(path: Path) -> int:
    until(lambda: text_of(path).endswith("\n"), f"{path.name} is written")
    return int(path.read_text())


def supervisors(scheduler: LocalScheduler) -> list[psutil.Process]:
    """The supervisors of this folder, and the keepers of its tasks, which look like them."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                str(scheduler.store.folder) in process.cmdline()
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def supervisor_of(scheduler: LocalScheduler, job_id: str) -> psutil.Process:
    return psutil.Process(
        int((scheduler.store.job_folder(int(job_id)) / "supervisor.lock").read_text())
    )


# A process that leaves its session, its parent and its environment behind, and does not obey TERM.
ESCAPE = (
    'env -i PATH="$PATH" setsid bash -c \'trap "" TERM HUP; (echo $BASHPID > escaped; exec sleep 7777) & disown\' &\n'
    "while [ ! -s escaped ]; do sleep 0.05; done\n"
)


# ----------------------------------------------------------------------------- crashes
@pytest.mark.parametrize("also_the_keeper", [False, True])
def test_a_killed_supervisor_is_noticed_and_the_array_goes_on(
    scheduler: LocalScheduler, also_the_keeper: bool
) -> None:
    folder = scheduler.store.folder.parent
    body = (
        "if [ $SLURM_ARRAY_TASK_ID = 1 ]; then\n"
        "sleep 7777 & echo $! > child; echo $$ > batch; wait\nelse touch went-on-$SLURM_ARRAY_TASK_ID\nfi"
    )
    array = scheduler.submit(request(scheduler, body, array="1-3%1"))
    pids = [read_number(folder / "child"), read_number(folder / "batch")]
    supervisor = supervisor_of(scheduler, array)
    keepers = [child for child in supervisor.children() if child.pid not in pids]
    assert len(keepers) == 1
    supervisor.suspend()  # both must die before either can act on it
    if also_the_keeper:
        keepers[0].kill()
    supervisor.kill()
    until(
        lambda: is_gone(supervisor.pid) and is_gone(keepers[0].pid),
        "supervisor and keeper are dead",
    )
    # the keeper alone cleans up, with no client about
    assert also_the_keeper or all(is_gone(pid) for pid in pids)
    lost = scheduler.job(f"{array}_1")
    assert lost is not None
    assert (lost.state, lost.reason) == (JobState.NODE_FAIL, "SupervisorDied")
    assert (
        lost.end_time is not None
        and lost.start_time is not None
        and lost.end_time >= lost.start_time
    )
    assert all(is_gone(pid) for pid in pids)
    assert ended(scheduler, f"{array}_3").state is JobState.COMPLETED
    assert (folder / "went-on-2").exists() and (folder / "went-on-3").exists()


def test_a_killed_keeper_is_a_node_failure(scheduler: LocalScheduler) -> None:
    folder = scheduler.store.folder.parent
    array = scheduler.submit(
        request(
            scheduler,
            ESCAPE + "[ $SLURM_ARRAY_TASK_ID = 2 ] || { echo $$ > batch; sleep 7777; }",
            array="1-2%1",
        )
    )
    batch, escaped = read_number(folder / "batch"), read_number(folder / "escaped")
    keeper = psutil.Process(batch).parent()
    assert keeper is not None
    keeper.kill()
    job = ended(scheduler, f"{array}_1")
    assert (job.state, job.reason) == (JobState.NODE_FAIL, "KeeperDied")
    until(lambda: is_gone(batch) and is_gone(escaped), "nothing of the task is left")
    assert ended(scheduler, f"{array}_2").state is JobState.COMPLETED


def test_a_dead_supervisor_is_replaced_for_waiting_work(scheduler: LocalScheduler) -> None:
    job_id = scheduler.submit(request(scheduler, "true", hold=True))
    supervisor = supervisor_of(scheduler, job_id)
    supervisor.kill()
    until(lambda: is_gone(supervisor.pid), "the supervisor is dead")
    scheduler.release(job_id)
    assert ended(scheduler, job_id).state is JobState.COMPLETED


def test_a_dead_supervisor_does_not_keep_nodes_from_others(scheduler: LocalScheduler) -> None:
    first = scheduler.submit(request(scheduler, "echo $$ > batch; sleep 7777", nodes=4))
    read_number(scheduler.store.folder.parent / "batch")
    second = scheduler.submit(
        request(scheduler, "touch second-ran", options=(("exclusive", ""), ("wckey", "x")))
    )
    supervisor_of(scheduler, first).kill()
    # No client is asked: the waiting supervisor itself finds its dead peer.
    until((scheduler.store.folder.parent / "second-ran").exists, "the second job has run")
    assert ended(scheduler, first).state is JobState.NODE_FAIL
    assert ended(scheduler, second).state is JobState.COMPLETED


def test_trouble_with_the_state_folder_does_not_end_a_job(scheduler: LocalScheduler) -> None:
    folder = scheduler.store.folder.parent
    job_id = scheduler.submit(
        request(scheduler, "touch ready; while [ ! -e go ]; do sleep 0.05; done; touch done")
    )
    until((folder / "ready").exists, "the script runs")
    settings = scheduler.store.folder / "settings.json"
    good = settings.read_text()
    settings.write_text("not JSON at all")
    state = scheduler.store.job_folder(int(job_id)) / "state.json"
    with (
        scheduler.store.changing()
    ):  # else the supervisor, which notes the start, may write a good one over it
        saved = state.read_text()
        state.write_text("{")
    scheduler.store.wake(int(job_id))
    log = scheduler.store.job_folder(int(job_id)) / "supervisor.log"
    until(lambda: "state.json" in text_of(log), "the supervisor complains")
    with pytest.raises(SchedulerUnreachable):
        scheduler.job(job_id)  # what cannot be read is unknown, not gone
    (folder / "go").touch()
    until((folder / "done").exists, "the script has done its work")
    state.write_text(saved)
    settings.write_text(good)
    assert ended(scheduler, job_id).state is JobState.COMPLETED
    assert len(log.read_text().splitlines()) <= 3  # said once, not twice a second


def test_a_start_that_goes_wrong_fails_that_task(scheduler: LocalScheduler) -> None:
    job_id = scheduler.submit(request(scheduler, "touch ran", hold=True))
    (scheduler.store.job_folder(int(job_id)) / "environment.json").unlink()
    scheduler.release(job_id)
    job = ended(scheduler, job_id)
    assert (job.state, job.exit_code) == (JobState.FAILED, 1)
    assert "environment.json" in job.reason
    assert not (scheduler.store.folder.parent / "ran").exists()


# ----------------------------------------------------------------------------- nothing survives
@pytest.mark.parametrize("how", ["ends", "is cancelled", "runs out of time"])
def test_no_process_survives_its_task(scheduler: LocalScheduler, how: str) -> None:
    folder = scheduler.store.folder.parent
    body = ESCAPE + ("exit 0" if how == "ends" else "sleep 7777")
    job_id = scheduler.submit(
        request(scheduler, body, time_limit_seconds=2 if how == "runs out of time" else 600)
    )
    escaped = read_number(folder / "escaped")
    assert not is_gone(escaped) or how == "ends"
    if how == "is cancelled":
        scheduler.cancel(job_id)
    states = {
        "ends": JobState.COMPLETED,
        "is cancelled": JobState.CANCELLED,
        "runs out of time": JobState.TIMEOUT,
    }
    assert ended(scheduler, job_id).state is states[how]
    assert is_gone(escaped)


def test_a_job_submitted_by_a_job_outlives_it(scheduler: LocalScheduler) -> None:
    program = (
        "from pathlib import Path; from tr11ops.cluster.base import BatchRequest\n"
        "from tr11ops.cluster.select import choose_scheduler\n"
        "script = '#!/bin/bash\\nwhile [ ! -e go ]; do sleep 0.05; done; env > inner\\n'\n"
        "print(choose_scheduler('auto').submit(BatchRequest(script, 'inner', 1, 600, 'inner.txt', Path.cwd())))\n"
    )
    (scheduler.store.folder.parent / "submit.py").write_text(program)
    outer = scheduler.submit(
        request(
            scheduler,
            f"'{sys.executable}' submit.py > inner-id; [ -s inner-id ]",
            environment={"PYTHONPATH": str(ROOT), "OUTER": "1"},
            array="5",
        )
    )
    assert ended(scheduler, f"{outer}_5").state is JobState.COMPLETED
    inner = (scheduler.store.folder.parent / "inner-id").read_text().strip()
    job = scheduler.job(inner)
    assert job is not None and not job.state.is_final
    (scheduler.store.folder.parent / "go").touch()
    assert ended(scheduler, inner).state is JobState.COMPLETED
    environment = (scheduler.store.folder.parent / "inner").read_text().splitlines()
    assert "OUTER=1" in environment
    assert f"SLURM_JOB_ID={inner}" in environment
    assert not [line for line in environment if line.startswith("SLURM_ARRAY")]


# ----------------------------------------------------------------------------- races
def test_many_clients_at_once_share_nodes_and_numbers(scheduler: LocalScheduler) -> None:
    folder = scheduler.store.folder.parent
    program = (
        "import sys; from pathlib import Path; from tr11ops.cluster.base import BatchRequest\n"
        "from tr11ops.cluster.local import LocalScheduler\n"
        "local = LocalScheduler(Path(sys.argv[1]) / 'state')\n"
        "for _ in range(3):\n"
        "    request = BatchRequest('#!/bin/bash\\nsleep 0.2\\n', 'race', 2, 600, 'r-%j', Path(sys.argv[1]))\n"
        "    print(local.submit(request), flush=True)\n"
        "request = BatchRequest('#!/bin/bash\\nsleep 7777\\n', 'race', 1, 600, 'r-%j', Path(sys.argv[1]))\n"
        "local.cancel(local.submit(request))\n"
    )
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    outputs = [client.communicate(timeout=PATIENCE_SECONDS)[0] for client in clients]
    assert [client.returncode for client in clients] == [0, 0, 0]
    ids = [line for output in outputs for line in output.split()]
    assert len(set(ids)) == 9
    until(lambda: all(job.state.is_final for job in scheduler.jobs()), "all have ended")
    jobs = scheduler.jobs()
    assert sorted(job.state for job in jobs) == sorted(
        [JobState.COMPLETED] * 9 + [JobState.CANCELLED] * 3
    )
    for node in scheduler.nodes():
        spans = sorted(
            (job.start_time, job.end_time)
            for job in jobs
            if node.name in job.nodes and job.start_time and job.end_time
        )
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_cancel_at_any_moment_of_the_start(scheduler: LocalScheduler) -> None:
    for delay in (0.0, 0.01, 0.02, 0.04):
        job_id = scheduler.submit(request(scheduler, "sleep 7777"))
        time.sleep(delay)
        scheduler.cancel(job_id)
        assert ended(scheduler, job_id).state is JobState.CANCELLED


def test_signal_waits_for_a_task_that_is_just_starting(scheduler: LocalScheduler) -> None:
    for _ in range(3):
        job_id = scheduler.submit(request(scheduler, "sleep 7777"))
        until(lambda job_id=job_id: scheduler.job(job_id).state is JobState.RUNNING, "it runs")  # type: ignore[misc]
        scheduler.signal(job_id, "KILL")
        job = ended(scheduler, job_id)
        assert (job.state, job.exit_signal) == (JobState.FAILED, signal.SIGKILL)


# ----------------------------------------------------------------------------- nodes, order, limits
def test_nodes_are_exclusive_and_first_come_first_served(scheduler: LocalScheduler) -> None:
    first = scheduler.submit(request(scheduler, "while [ ! -e go ]; do sleep 0.05; done", nodes=3))
    until(lambda: scheduler.job(first).state is JobState.RUNNING, "the first runs")  # type: ignore[union-attr]
    large = scheduler.submit(request(scheduler, "true", nodes=4))
    small = scheduler.submit(request(scheduler, "true", nodes=1))
    outside = scheduler.submit(request(scheduler, "true", nodes=1, exclude=("local-node4",)))

    def reason(job_id: str) -> str:
        job = scheduler.job(job_id)
        return job.reason if job else ""

    until(lambda: reason(large) == "Resources", "the large one waits for nodes")
    # One node is free, but the earlier job needs it.
    until(lambda: reason(small) == "Priority", "the small one waits for its turn")
    until(lambda: reason(outside) == "Resources", "no node is free for the third")
    assert {node.name for node in scheduler.nodes() if "idle" in node.states} == {"local-node4"}
    (scheduler.store.folder.parent / "go").touch()
    jobs = [ended(scheduler, job_id) for job_id in (first, large, small)]
    assert jobs[0].end_time <= jobs[1].start_time  # type: ignore[operator]
    assert jobs[1].end_time <= jobs[2].start_time  # type: ignore[operator]
    assert ended(scheduler, outside).nodes == ("local-node1",) or ended(
        scheduler, outside
    ).nodes == ("local-node2",)


def test_limits_of_seconds_are_kept(scheduler: LocalScheduler) -> None:
    job = ended(scheduler, scheduler.submit(request(scheduler, "sleep 7777", time_limit_seconds=1)))
    assert (job.state, job.reason, job.exit_signal) == (
        JobState.TIMEOUT,
        "TimeLimit",
        signal.SIGTERM,
    )
    assert job.end_time is not None and job.start_time is not None
    assert job.end_time - job.start_time >= 1.0  # never early


def test_what_cannot_start_fails_with_the_reason(scheduler: LocalScheduler) -> None:
    job = ended(scheduler, scheduler.submit(request(scheduler, "true", output="no/such/folder/%j")))
    assert (job.state, job.exit_code) == (JobState.FAILED, 1)
    assert "no/such/folder" in job.reason
    job = ended(
        scheduler, scheduler.submit(request(scheduler, "true", script="#!/no/such/interpreter\n"))
    )
    assert (job.state, job.exit_code) == (JobState.FAILED, 1)
    assert "/no/such/interpreter" in job.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"script": "echo no interpreter\n"}, "#!"),
        ({"name": "zero\0byte"}, "NUL"),
        ({"nodes": 5}, "5 nodes"),
        ({"nodes": 0}, "0 nodes"),
        ({"nodes": 2, "exclude": ("local-node1", "local-node2", "local-node3")}, "1 can be had"),
        ({"exclude": ("local-node9",)}, "local-node9"),
        ({"time_limit_seconds": 0}, "time limit"),
        ({"time_limit_seconds": 7201}, "7200"),
        ({"signal_seconds_before_limit": 600}, "signal"),
        ({"partition": "gpu_p5"}, "gpu_p5"),
        ({"constraint": "a100"}, "a100"),
        ({"reservation": "hub"}, "hub"),
        ({"gpus_per_node": 3}, "3 GPUs"),
        ({"working_directory": Path("/no/such/folder")}, "/no/such/folder"),
        ({"array": "1-3%0"}, "1-3%0"),
        ({"array": ""}, "array"),
        ({"array": "1-20000"}, "20000"),
        ({"array": "3-1"}, "the range 3-1 is empty; use 1-3"),
        ({"dependency": "afterany"}, "write it like afterany:12:13_4"),
        ({"dependency": "afterok:1"}, "write it like afterany:12:13_4"),
        ({"dependency": "afterany:77"}, "'afterany:77': such a job is not known"),
        ({"dependency": "afterany:1,2"}, "invalid job id '1,2'"),
    ],
)
def test_refusals_name_the_fault_in_one_line(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    settings = LocalSettings(nodes=simulated_nodes(4), max_time_seconds=7200, gpus_per_node=2)
    scheduler = LocalScheduler(tmp_path / "state", settings)
    refused = request(scheduler, "true", **changes)
    verdict = scheduler.test(refused)
    assert not verdict.accepted
    assert words in verdict.message
    with pytest.raises(SchedulerError) as refusal:
        scheduler.submit(refused)
    assert str(refusal.value) == verdict.message
    assert "\n" not in verdict.message
    assert scheduler.jobs() == ()
    assert list((tmp_path / "state" / "jobs").iterdir()) == []


# ----------------------------------------------------------------------------- memory and settings
def test_a_folder_holds_thousands_of_tasks_in_few_jobs(scheduler: LocalScheduler) -> None:
    array = scheduler.submit(request(scheduler, "true", array="1-9000%1", hold=True))
    scheduler.hold(f"{array}_5")
    scheduler.exclude(f"{array}_7", ("local-node1",))
    scheduler.cancel(f"{array}_9")
    jobs = {job.job_id: job for job in scheduler.jobs()}
    assert sorted(jobs) == sorted([f"{array}_[1-6,8,10-9000%1]", f"{array}_7", f"{array}_9"])
    assert len(jobs[f"{array}_[1-6,8,10-9000%1]"].pending_tasks) == 8998
    assert jobs[f"{array}_7"].excluded == ("local-node1",)
    assert jobs[f"{array}_9"].state is JobState.CANCELLED
    scheduler.cancel(array)
    assert {job.state for job in scheduler.jobs()} == {JobState.CANCELLED}


def test_old_jobs_are_forgotten_but_not_what_others_wait_for(scheduler: LocalScheduler) -> None:
    old, needed = (scheduler.submit(request(scheduler, "true")) for _ in range(2))
    for job_id in (old, needed):
        ended(scheduler, job_id)
    waiting = scheduler.submit(
        request(scheduler, "true", hold=True, dependency=f"afterany:{needed}")
    )
    scheduler.store.save_settings(replace(scheduler.store.settings(), keep_seconds=0.0))
    assert scheduler.job(old) is None
    newest = scheduler.submit(request(scheduler, "true", hold=True))
    assert not scheduler.store.job_folder(int(old)).exists()
    assert scheduler.store.job_folder(int(needed)).exists()
    assert {job.job_id for job in scheduler.jobs()} == {waiting, newest}
    assert int(newest) > int(waiting) > int(needed) > int(old)  # numbers are never used twice
    scheduler.store.save_settings(replace(scheduler.store.settings(), keep_seconds=600.0))
    scheduler.release(waiting)
    assert ended(scheduler, waiting).state is JobState.COMPLETED
    forgotten = scheduler.submit(request(scheduler, "true", dependency=f"afterany:{old}"))
    assert ended(scheduler, forgotten).state is JobState.COMPLETED


def test_a_secret_of_the_submitter_is_kept_private_and_short(scheduler: LocalScheduler) -> None:
    job_id = scheduler.submit(
        request(scheduler, "echo $TOKEN > told", environment={"TOKEN": "s3cret"}, hold=True)
    )
    kept = scheduler.store.job_folder(int(job_id)) / "environment.json"
    assert kept.stat().st_mode & 0o077 == 0
    assert "s3cret" in kept.read_text()
    scheduler.release(job_id)
    ended(scheduler, job_id)
    assert text_of(scheduler.store.folder.parent / "told") == "s3cret\n"
    until(lambda: not supervisors(scheduler), "the supervisor has gone")
    for path in scheduler.store.folder.rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path


def test_settings_come_from_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "state"))
    monkeypatch.delenv("TR11_LOCAL_NODES", raising=False)
    assert [node.name for node in LocalScheduler().nodes()] == [machine_name()]
    monkeypatch.setenv("TR11_LOCAL_NODES", "3")
    assert [node.name for node in LocalScheduler().nodes()] == list(simulated_nodes(3))
    monkeypatch.setenv("TR11_LOCAL_NODES", "red, green")
    (partition,) = LocalScheduler().partitions()
    assert (partition.node_names, partition.max_time_seconds) == (("red", "green"), None)
    monkeypatch.delenv("TR11_LOCAL_NODES")
    (tmp_path / "state" / "settings.json").write_text(
        json.dumps({"nodes": 2, "max_time_seconds": 60})
    )
    (partition,) = LocalScheduler().partitions()
    assert (partition.node_names, partition.max_time_seconds) == (simulated_nodes(2), 60)
    # what was asked for once stays, until this is
    monkeypatch.setenv("TR11_LOCAL_NODES", "machine")
    assert [node.name for node in LocalScheduler().nodes()] == [machine_name()]
    monkeypatch.delenv("TR11_LOCAL_NODES")
    assert [node.name for node in LocalScheduler().nodes()] == [machine_name()]
    for bad in ({"noodles": 2}, {"nodes": 0}, {"nodes": [1]}, {"kill_wait_seconds": "long"}):
        (tmp_path / "state" / "settings.json").write_text(json.dumps(bad))
        with pytest.raises(SchedulerError, match=f"settings.json.*{next(iter(bad))}"):
            LocalScheduler().nodes()
    for wrong in ("0", "a b", "x,x"):
        monkeypatch.setenv("TR11_LOCAL_NODES", wrong)
        with pytest.raises(SchedulerError, match="TR11_LOCAL_NODES"):
            LocalScheduler()


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SchedulerError, match="TR11_LOCAL_SCHEDULER"):
        LocalScheduler(tmp_path / "file" / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

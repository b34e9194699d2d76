"""What every scheduler must do: the same tests on the embedded scheduler and on a real Slurm (the
twin).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.waiting import until
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.arrays import tasks_of
from tr11ops.cluster.base import BatchRequest, Job, JobState, Scheduler
from tr11ops.cluster.local import LocalScheduler, LocalSettings
from tr11ops.cluster.local_records import simulated_nodes
from tr11ops.cluster.select import choose_scheduler
from trainer.contract.record import Record

HOSTILE_NAME = 'it\'s "one" $(touch substituted) `touch ticked` ; %% \\ ü'


class Limited(Record):
    """A job that runs into its time limit while the other tests go on: Slurm's limits are whole
    minutes.
    """

    job_id: str
    folder: Path
    limit_seconds: int


@dataclass
class Cluster:
    """A scheduler under test, and what differs between them."""

    scheduler: Scheduler
    folder: Path
    nodes: tuple[str, ...]
    poll_seconds: float
    limited: Limited

    def request(self, body: str, **changes: object) -> BatchRequest:
        plain = BatchRequest(
            script="#!/bin/bash\n" + body + "\n",
            name="contract",
            nodes=1,
            time_limit_seconds=600,
            output="job-%j.txt",
            working_directory=self.folder,
        )
        return replace(plain, **changes)  # type: ignore[arg-type]

    def submit(self, body: str, **changes: object) -> str:
        return self.scheduler.submit(self.request(body, **changes))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, what, pause=self.poll_seconds)

    def state(self, job_id: str) -> JobState:
        job = self.scheduler.job(job_id)
        assert job is not None, f"{job_id} is not known"
        return job.state

    def until_state(self, job_id: str, state: JobState) -> Job:
        self.until(
            lambda: self.state(job_id) in {state} or self.state(job_id).is_final,
            f"{job_id} is {state}",
        )
        job = self.scheduler.job(job_id)
        assert job is not None
        assert job.state is state, job
        return job

    def ended(self, job_id: str) -> Job:
        self.until(lambda: self.state(job_id).is_final, f"{job_id} has ended")
        job = self.scheduler.job(job_id)
        assert job is not None
        return job

    def array(self, array_id: str) -> tuple[Job, ...]:
        return tuple(job for job in self.scheduler.jobs() if job.array_id == array_id)

    def ended_array(self, array_id: str) -> dict[int, Job]:
        self.until(
            lambda: all(job.state.is_final for job in self.array(array_id)),
            f"array {array_id} has ended",
        )
        return {job.task_id: job for job in self.array(array_id) if job.task_id is not None}

    def left(self) -> list[Job]:
        """The test's jobs that are not over."""
        return [
            job
            for job in self.scheduler.jobs()
            if not job.state.is_final and job.job_id != self.limited.job_id
        ]

    def unfinished(self) -> set[str]:
        return {job.job_id for job in self.left()}

    def lines(self, name: str) -> list[str]:
        return lines_of(self.folder / name)

    def clear(self) -> None:
        """Cancel what a test left, and wait until nothing of it runs."""
        for job_id in {job.array_id or job.job_id for job in self.left()}:
            self.scheduler.cancel(job_id)
        self.until(lambda: not self.left(), "all jobs have ended")


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(scope="module", params=["local", "slurm"])
def scheduler(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scheduler]:
    if request.param == "local":
        folder = tmp_path_factory.mktemp("scheduler")
        yield LocalScheduler(folder, LocalSettings(nodes=simulated_nodes(8), kill_wait_seconds=5.0))
        return
    twin = request.getfixturevalue("twin")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in twin.environment.items():
            patch.setenv(key, value)
        yield choose_scheduler("auto")


@pytest.fixture(scope="module")
def limited(scheduler: Scheduler, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    """A job that hears of its limit, and does not end by itself."""
    body = "\n".join(
        [
            "trap 'echo early >> said' USR1",
            "trap 'echo late >> said' TERM",  # heard, and not obeyed: KILL must follow
            "(trap '' TERM; trap 'echo child >> said' USR1; while true; do sleep 0.2; done) &",
            "echo $! > child",
            "while true; do sleep 0.2; done",
        ]
    )
    folder = tmp_path_factory.mktemp("limited")
    folder.chmod(0o777)
    limit, early = (60, 30) if scheduler.name == "slurm" else (3, 1)
    request = BatchRequest(f"#!/bin/bash\n{body}\n", "limited", 1, limit, "job-%j.txt", folder)
    job_id = scheduler.submit(replace(request, signal_seconds_before_limit=early))
    yield Limited(job_id, folder, limit)
    scheduler.cancel(job_id)


@pytest.fixture
def cluster(scheduler: Scheduler, limited: Limited, tmp_path: Path) -> Iterator[Cluster]:
    tmp_path.chmod(0o777)
    default = next(partition for partition in scheduler.partitions() if partition.is_default)
    under_test = Cluster(
        scheduler, tmp_path, default.node_names, 0.5 if scheduler.name == "slurm" else 0.1, limited
    )
    try:
        yield under_test
    finally:
        under_test.clear()


def test_jobs_end_with_their_exit_code_or_signal(cluster: Cluster) -> None:
    before = time.time()
    good = cluster.submit("echo fine", nodes=2, comment="a comment", name="contract-good")
    bad = cluster.submit("exit 3")
    killed = cluster.submit("kill -KILL $$")
    job = cluster.ended(good)
    assert (job.state, job.exit_code) == (JobState.COMPLETED, 0)
    assert (job.name, job.array_id, job.task_id, job.node_count) == ("contract-good", None, None, 2)
    assert len(set(job.nodes)) == 2 and set(job.nodes) <= set(cluster.nodes)
    assert job.submit_time is not None and job.start_time is not None and job.end_time is not None
    assert before - 2 <= job.submit_time <= job.start_time <= job.end_time <= time.time() + 2
    assert job.time_limit_seconds == 600
    assert job.comment == "a comment"
    assert job.output == str(cluster.folder / f"job-{good}.txt")
    assert cluster.lines(f"job-{good}.txt") == ["fine"]
    job = cluster.ended(bad)
    assert (job.state, job.exit_code) == (JobState.FAILED, 3)
    job = cluster.ended(killed)
    assert (job.state, job.exit_code, job.exit_signal) == (JobState.FAILED, 0, 9)
    assert {job.job_id for job in cluster.scheduler.jobs(name="contract-good")} >= {good}
    assert not {job.job_id for job in cluster.scheduler.jobs(name="contract-good")} & {bad, killed}
    assert {job.job_id for job in cluster.scheduler.jobs()} >= {good, bad, killed}


def test_the_batch_script_finds_its_job_in_the_environment(cluster: Cluster) -> None:
    array = cluster.submit(
        'env -0 > "environment-$SLURM_ARRAY_TASK_ID"',
        array="2-6:2%1",
        nodes=2,
        name="surroundings",
        environment={"OWN_WORD": "two words $HOME"},
        output="%x-%A-%3a.out",
    )
    jobs = cluster.ended_array(array)
    assert sorted(jobs) == [2, 4, 6]
    assert len({job.raw_id for job in jobs.values()}) == 3
    for task_id, job in jobs.items():
        text = (cluster.folder / f"environment-{task_id}").read_text()
        variables = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
        expected = {
            "SLURM_JOB_ID": job.raw_id,
            "SLURM_ARRAY_JOB_ID": array,
            "SLURM_ARRAY_TASK_ID": str(task_id),
            "SLURM_ARRAY_TASK_MIN": "2",
            "SLURM_ARRAY_TASK_MAX": "6",
            "SLURM_ARRAY_TASK_STEP": "2",
            "SLURM_ARRAY_TASK_COUNT": "3",
            "SLURM_JOB_NAME": "surroundings",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NUM_NODES": "2",
            "PWD": str(cluster.folder),
            "SLURM_JOB_PARTITION": job.partition,
            "OWN_WORD": "two words $HOME",
        }
        assert {key: variables.get(key) for key in expected} == expected
        assert variables["SLURM_JOB_NODELIST"] == variables["SLURM_NODELIST"]
        assert variables["SLURM_JOB_NODELIST"].startswith(job.nodes[0].rstrip("0123456789"))
        assert (cluster.folder / f"surroundings-{array}-{task_id:03d}.out").exists()


def test_hostile_text_arrives_as_it_is_and_is_never_run(cluster: Cluster) -> None:
    folder = cluster.folder / 'a folder\'s "name" $(touch substituted)'
    folder.mkdir()
    folder.chmod(0o777)
    job_id = cluster.submit(
        'printf %s "$SLURM_JOB_NAME" > name; printf %s "$WORD" > word',
        name=HOSTILE_NAME,
        comment=HOSTILE_NAME,
        working_directory=folder,
        environment={"WORD": "line one\nline 'two', three=$(touch substituted)"},
        output="out put's %j.txt",
    )
    job = cluster.ended(job_id)
    assert (job.state, job.name, job.comment) == (JobState.COMPLETED, HOSTILE_NAME, HOSTILE_NAME)
    assert (folder / "name").read_text() == HOSTILE_NAME
    assert (folder / "word").read_text() == "line one\nline 'two', three=$(touch substituted)"
    assert (folder / f"out put's {job_id}.txt").exists()
    assert {path.name for path in cluster.folder.rglob("*")} & {"substituted", "ticked"} == set()
    assert [found.job_id for found in cluster.scheduler.jobs(name=HOSTILE_NAME)] == [job_id]


def test_an_array_of_one_at_a_time_runs_in_order(cluster: Cluster) -> None:
    body = "echo start $SLURM_ARRAY_TASK_ID >> order; sleep 0.5; echo end $SLURM_ARRAY_TASK_ID >> order"
    array = cluster.submit(body, array="1-3%1", hold=True)
    (waiting,) = cluster.array(array)
    assert waiting.state is JobState.PENDING
    assert waiting.pending_tasks == (1, 2, 3)
    assert waiting.array_id == array
    assert waiting.job_id == f"{array}_[1-3%1]"
    cluster.scheduler.release(array)
    jobs = cluster.ended_array(array)
    assert [jobs[task].state for task in (1, 2, 3)] == [JobState.COMPLETED] * 3
    assert [jobs[task].job_id for task in (1, 2, 3)] == [f"{array}_{task}" for task in (1, 2, 3)]
    assert cluster.lines("order") == [
        f"{word} {task}" for task in (1, 2, 3) for word in ("start", "end")
    ]


def test_a_throttle_of_two_is_kept(cluster: Cluster) -> None:
    array = cluster.submit("echo +1 >> load; sleep 1; echo -1 >> load", array="1-4%2")
    assert len(cluster.ended_array(array)) == 4
    level = [sum(int(line) for line in cluster.lines("load")[: end + 1]) for end in range(8)]
    assert max(level) == 2
    assert level[-1] == 0


def test_one_task_of_an_array_is_cancelled(cluster: Cluster) -> None:
    array = cluster.submit("touch ran-$SLURM_ARRAY_TASK_ID", array="1-4%1", hold=True)
    cluster.scheduler.cancel(f"{array}_2")
    cluster.scheduler.cancel(f"{array}_3")
    cluster.scheduler.release(array)
    cluster.until(lambda: cluster.state(f"{array}_4").is_final, "task 4 has ended")
    states = {task: cluster.state(f"{array}_{task}") for task in (1, 4)}
    assert states == {1: JobState.COMPLETED, 4: JobState.COMPLETED}
    for task in (2, 3):  # Slurm forgets tasks that were cancelled before they started
        job = cluster.scheduler.job(f"{array}_{task}")
        assert job is None or job.state is JobState.CANCELLED
    assert sorted(path.name for path in cluster.folder.glob("ran-*")) == ["ran-1", "ran-4"]


def test_a_running_task_is_cancelled_by_its_own_number(cluster: Cluster) -> None:
    array = cluster.submit("touch ran-$SLURM_ARRAY_TASK_ID; sleep 7777", array="1-2")
    cluster.until(lambda: len(list(cluster.folder.glob("ran-*"))) == 2, "both tasks run")
    [number] = [job.raw_id for job in cluster.array(array) if job.task_id == 1]
    assert number != array
    cluster.scheduler.cancel(number)
    cluster.until_state(f"{array}_1", JobState.CANCELLED)
    assert cluster.state(f"{array}_2") is JobState.RUNNING
    cluster.scheduler.cancel(array)


def test_cancel_ends_a_running_array_and_its_processes(cluster: Cluster) -> None:
    array = cluster.submit("sleep 7777 & echo $! > child; echo $$ > batch; wait", array="1-9%1")
    cluster.until(lambda: bool(cluster.lines("batch")), "the script has started")
    pids = [int(cluster.lines(name)[0]) for name in ("batch", "child")]
    assert cluster.state(f"{array}_1") is JobState.RUNNING
    cluster.scheduler.cancel(array)
    cluster.until(
        lambda: all(job.state.is_final for job in cluster.array(array)), "the array has ended"
    )
    assert {job.state for job in cluster.array(array)} == {JobState.CANCELLED}
    cluster.until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "its processes have ended"
    )
    cluster.scheduler.cancel(array)  # a second time is no error


def test_hold_and_release_of_tasks_behind_a_running_one(cluster: Cluster) -> None:
    array = cluster.submit(
        "touch started-$SLURM_ARRAY_TASK_ID; while [ ! -e go ]; do sleep 0.1; done",
        array="1-2%1",
        name="holding",
    )
    cluster.until((cluster.folder / "started-1").exists, "task 1 runs")
    cluster.scheduler.hold(array)
    waiting = cluster.scheduler.job(f"{array}_2")
    assert waiting is not None and waiting.state is JobState.PENDING
    assert waiting.reason in {"JobHeldUser", "JobHeldAdmin"}
    assert cluster.state(f"{array}_1") is JobState.RUNNING
    (cluster.folder / "go").touch()
    cluster.until_state(f"{array}_1", JobState.COMPLETED)
    after = cluster.submit("true")
    cluster.until_state(after, JobState.COMPLETED)  # the scheduler had its chance to start task 2
    assert cluster.state(f"{array}_2") is JobState.PENDING
    cluster.scheduler.release(f"{array}_2")
    cluster.until_state(f"{array}_2", JobState.COMPLETED)
    assert (cluster.folder / "started-2").exists()


def test_a_part_of_an_array_is_held_without_the_rest(cluster: Cluster) -> None:
    """Every way to ask shows which tasks are held: Slurm's own table shows the waiting tasks of an
    array as one.
    """
    array = cluster.submit(
        "while [ ! -e go ]; do sleep 0.1; done; touch ran-$SLURM_ARRAY_TASK_ID",
        array="1-6%1",
        name="apart",
    )
    cluster.until_state(f"{array}_1", JobState.RUNNING)

    def held() -> list[set[int]]:
        asked = (cluster.scheduler.jobs(), cluster.scheduler.jobs(name="apart"))
        own = [
            [job for job in jobs if job.array_id == array and job.reason.startswith("JobHeld")]
            for jobs in asked
        ]
        return [{task for job in jobs for task in tasks_of(job)} for jobs in own]

    cluster.scheduler.hold(f"{array}_4")
    cluster.scheduler.hold(f"{array}_[2-3,5-6]")
    assert held() == [{2, 3, 4, 5, 6}] * 2
    cluster.scheduler.release(f"{array}_[2-3,5-6]")
    assert held() == [{4}] * 2
    (cluster.folder / "go").touch()
    cluster.until(lambda: len(list(cluster.folder.glob("ran-*"))) == 5, "the others have run")
    assert held() == [{4}] * 2 and not (cluster.folder / "ran-4").exists()


def test_excluded_nodes_are_not_used_also_when_excluded_later(cluster: Cluster) -> None:
    kept, left_out = cluster.nodes[-2:], cluster.nodes[:-2]
    first = cluster.submit("true", nodes=2, exclude=left_out)
    later = cluster.submit("true", nodes=2, array="1-2%1", hold=True)
    cluster.scheduler.exclude(later, left_out)
    (waiting,) = cluster.array(later)
    assert set(waiting.excluded) == set(left_out)
    cluster.scheduler.release(later)
    assert set(cluster.ended(first).nodes) == set(kept)
    jobs = cluster.ended_array(later)
    assert {task: set(job.nodes) for task, job in jobs.items()} == {1: set(kept), 2: set(kept)}
    with pytest.raises(SchedulerError):
        cluster.scheduler.exclude(first, left_out)  # no longer pending


@pytest.mark.parametrize(
    "what", ["too many nodes", "bad array", "all excluded", "unknown node excluded"]
)
def test_impossible_requests_are_refused_in_one_line(cluster: Cluster, what: str) -> None:
    changes: dict[str, object] = {
        "too many nodes": {"nodes": len(cluster.nodes) + 1},
        "bad array": {"array": "1-%1"},
        "all excluded": {"exclude": cluster.nodes},
        "unknown node excluded": {"exclude": ("no-such-node",)},
    }[what]
    request = cluster.request("true", **changes)
    before = cluster.unfinished()
    verdict = cluster.scheduler.test(request)
    assert not verdict.accepted
    assert verdict.message.strip()
    with pytest.raises(SchedulerError) as refusal:
        cluster.scheduler.submit(request)
    assert len(str(refusal.value).strip().splitlines()) == 1
    assert cluster.scheduler.test(cluster.request("true")).accepted
    assert cluster.unfinished() == before


def test_an_unknown_job_is_none_and_is_not_steered(cluster: Cluster) -> None:
    assert cluster.scheduler.job("99999999") is None
    cluster.scheduler.cancel("99999999")  # what is not there need not be ended
    for steer in (cluster.scheduler.hold, cluster.scheduler.release):
        with pytest.raises(SchedulerError):
            steer("99999999")
    with pytest.raises(SchedulerError):
        cluster.scheduler.signal("99999999", "USR1")
    with pytest.raises(SchedulerError):
        cluster.scheduler.cancel("7; touch substituted")
    assert not (cluster.folder / "substituted").exists()


def test_dependencies(cluster: Cluster) -> None:
    good = cluster.submit("true", hold=True)
    bad = cluster.submit("false", hold=True)
    after_end = cluster.submit("true", dependency=f"afterany:{good}:{bad}")
    after_one = cluster.submit("true", dependency=f"afterany:{good}")
    waiting = cluster.scheduler.job(after_end)
    assert waiting is not None and (waiting.state, waiting.reason) == (
        JobState.PENDING,
        "Dependency",
    )
    assert good in waiting.dependency
    cluster.scheduler.release(good)
    assert cluster.ended(after_one).state is JobState.COMPLETED
    assert cluster.state(after_end) is JobState.PENDING
    cluster.scheduler.release(bad)
    assert cluster.ended(after_end).state is JobState.COMPLETED


def test_jobs_outlive_the_process_that_submitted_them(cluster: Cluster) -> None:
    program = (
        "import sys; from pathlib import Path; from tr11ops.cluster.base import BatchRequest\n"
        "from tr11ops.cluster.select import choose_scheduler\n"
        "folder = Path(sys.argv[2]); script = '#!/bin/bash\\nwhile [ ! -e go ]; do sleep 0.1; done; touch done\\n'\n"
        "request = BatchRequest(script, 'orphan', 1, 600, 'orphan.txt', folder)\n"
        "print(choose_scheduler(sys.argv[1]).submit(request))\n"
    )
    scheduler = cluster.scheduler
    folder = (
        {"TR11_LOCAL_SCHEDULER": str(scheduler.store.folder)}
        if isinstance(scheduler, LocalScheduler)
        else {}
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program, scheduler.name, str(cluster.folder)],
        env={**os.environ, **folder},
        cwd=Path(__file__).parents[3],
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    job_id = outcome.stdout.strip()
    cluster.until_state(job_id, JobState.RUNNING)
    (cluster.folder / "go").touch()
    assert cluster.ended(job_id).state is JobState.COMPLETED
    assert (cluster.folder / "done").exists()


def test_a_signal_reaches_the_batch_script(cluster: Cluster) -> None:
    job_id = cluster.submit("trap 'exit 7' USR1; touch ready; while true; do sleep 0.1; done")
    cluster.until((cluster.folder / "ready").exists, "the script is ready")
    cluster.scheduler.signal(job_id, "USR1")
    job = cluster.ended(job_id)
    assert (job.state, job.exit_code) == (JobState.FAILED, 7)
    held = cluster.submit("true", hold=True)
    with pytest.raises(SchedulerError):
        cluster.scheduler.signal(held, "USR1")


def test_nodes_show_what_runs_on_them(cluster: Cluster) -> None:
    job_id = cluster.submit("touch ready; while true; do sleep 0.2; done", nodes=2)
    cluster.until((cluster.folder / "ready").exists, "the script runs")
    job = cluster.scheduler.job(job_id)
    nodes = {node.name: node for node in cluster.scheduler.nodes()}
    assert job is not None and len(job.nodes) == 2
    assert set(cluster.nodes) <= set(nodes)
    for name in job.nodes:
        assert nodes[name].states & {"allocated", "mixed"}
        assert nodes[name].is_usable
        assert nodes[name].cpus > 0 and nodes[name].memory_megabytes > 0
        assert job.partition in nodes[name].partitions


def test_a_quoted_script_is_passed_byte_for_byte(cluster: Cluster) -> None:
    text = "tab\t quote' dollar$HOME back\\slash ü end"
    job_id = cluster.submit(f"printf %s {shlex.quote(text)}\n#SBATCH --time=nonsense\n")
    cluster.ended(job_id)
    assert (cluster.folder / f"job-{job_id}.txt").read_text() == text


def test_the_time_limit_warns_then_ends_the_whole_tree(cluster: Cluster) -> None:
    """The last test: the others ran in the meantime."""
    limited = cluster.limited
    job = cluster.ended(limited.job_id)
    assert job.state is JobState.TIMEOUT
    # the early signal is for the script alone
    assert lines_of(limited.folder / "said") == ["early", "late"]
    assert job.time_limit_seconds == limited.limit_seconds
    pid = int(lines_of(limited.folder / "child")[0])
    cluster.until(lambda: not Path(f"/proc/{pid}").exists(), "the child has ended")

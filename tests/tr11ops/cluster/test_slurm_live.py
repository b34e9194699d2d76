"""What only a real Slurm can show: its traps with arrays, its silence, its two ways to print a
queue.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.waiting import until
from tr11ops.base.errors import SchedulerUnreachable
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.cluster.slurm_command import CommandResult, run_command
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin


def has_state(scheduler: SlurmScheduler, job_id: str, state: JobState) -> bool:
    job = scheduler.job(job_id)
    return job is not None and job.state is state


@pytest.fixture
def request_(tmp_path: Path) -> BatchRequest:
    return BatchRequest("#!/bin/bash\nsleep 600\n", "live", 1, 3600, "%x-%A_%a.out", tmp_path)


def test_a_signal_to_an_array_with_waiting_tasks_arrives_once(
    slurm: SlurmScheduler, request_: BatchRequest
) -> None:
    """Slurm 22.05 answers "try again later" for the waiting tasks, and scancel would repeat the
    signal.
    """
    script = "#!/bin/bash\ntrap 'echo got' USR1\necho ready\nuntil test -e go; do sleep 0.1; done\n"
    array = slurm.submit(replace(request_, script=script, array="1-5%1"))
    output = request_.working_directory / f"live-{array}_1.out"
    until(lambda: output.exists() and "ready" in output.read_text(), "the first task runs")
    slurm.signal(array, "USR1")
    until(lambda: "got" in output.read_text(), "the signal arrives")
    (request_.working_directory / "go").touch()
    until(lambda: has_state(slurm, f"{array}_1", JobState.COMPLETED), "the first task has ended")
    assert output.read_text() == "ready\ngot\n"


def test_a_task_goes_back_into_the_queue_alone(
    slurm: SlurmScheduler, request_: BatchRequest
) -> None:
    """The last task of an array to begin has the array's own number, by which scontrol requeues all
    of them.
    """
    array = slurm.submit(replace(request_, array="1-3"))
    names = {f"{array}_{task}" for task in (1, 2, 3)}
    until(lambda: all(has_state(slurm, name, JobState.RUNNING) for name in names), "all tasks run")
    [last] = [job.job_id for job in slurm.jobs() if job.raw_id == array]
    slurm.requeue(array)
    until(lambda: has_state(slurm, last, JobState.PENDING), "the one that bears that number waits")
    assert all(has_state(slurm, name, JobState.RUNNING) for name in names - {last})


def test_the_last_task_to_begin_is_cancelled_alone_by_its_place(
    slurm: SlurmScheduler, request_: BatchRequest
) -> None:
    """By its number, which is the array's too, all tasks are."""
    array = slurm.submit(replace(request_, array="1-3"))
    names = {f"{array}_{task}" for task in (1, 2, 3)}
    until(lambda: all(has_state(slurm, name, JobState.RUNNING) for name in names), "all tasks run")
    [last] = [job.job_id for job in slurm.jobs() if job.raw_id == array]
    slurm.cancel(last)
    until(lambda: has_state(slurm, last, JobState.CANCELLED), "the one is cancelled")
    assert all(has_state(slurm, name, JobState.RUNNING) for name in names - {last})
    slurm.cancel(array)
    for name in names:
        until(lambda name=name: has_state(slurm, name, JobState.CANCELLED), "all are cancelled")


def test_both_ways_to_print_a_queue_agree(slurm: SlurmScheduler, request_: BatchRequest) -> None:
    # far beyond the 64 characters Slurm shows by itself
    tasks = ",".join(str(number) for number in range(1, 400, 3))
    name = "two  words | = \"quoted\" 'name' ü"
    held = slurm.submit(replace(request_, array=tasks, hold=True, name=name, comment="key = a|b c"))
    running = slurm.submit(replace(request_, array="3-9:2%1", nodes=2, gpus_per_node=4))
    failed = slurm.submit(
        replace(request_, script="#!/bin/bash\nexit 7\n", exclude=("jean-zay-iam02",))
    )
    until(lambda: has_state(slurm, f"{running}_3", JobState.RUNNING), "the array runs")
    until(lambda: has_state(slurm, failed, JobState.FAILED), "the job has failed")
    mine = {held, running, failed}

    def recorded() -> dict[str, Job]:
        return {job.job_id: job for job in slurm.jobs() if (job.array_id or job.job_id) in mine}

    def tabled() -> dict[str, Job]:
        """The quick table, which is asked for by a job's name; it tells all but the excluded nodes."""
        named = {
            other.raw_id: other for each in (name, request_.name) for other in slurm.jobs(name=each)
        }
        return {
            job_id: replace(named[job.raw_id], excluded=job.excluded)
            for job_id, job in recorded().items()
            if job.raw_id in named
        }

    # the queue moves between two looks: they must agree once it rests
    until(lambda: recorded() == tabled(), "both ways agree")
    jobs = recorded()
    assert len(jobs) == 4
    waiting = next(job for job in jobs.values() if job.raw_id == held)
    assert waiting.pending_tasks == tuple(range(1, 400, 3))
    assert (waiting.name, waiting.comment) == (name, "key = a|b c")
    assert jobs[failed].exit_code == 7
    assert jobs[failed].excluded == ("jean-zay-iam02",)


def test_nine_thousand_queued_tasks_are_one_record_and_one_call(
    slurm: SlurmScheduler, twin: Twin, request_: BatchRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def counting(arguments: Sequence[str], **settings: object) -> CommandResult:
        asked.append(arguments[0])
        return run_command(arguments, **settings)  # type: ignore[arg-type]

    array = slurm.submit(replace(request_, array="1-9000%1", hold=True))
    scheduler = SlurmScheduler(twin.environment, runner=counting)
    began = time.monotonic()
    (waiting,) = [job for job in scheduler.jobs() if job.array_id == array]
    nodes = scheduler.nodes()
    with capsys.disabled():
        print(
            f"\nqueue of 9,000 waiting tasks and {len(nodes)} nodes read in {time.monotonic() - began:.3f} s"
        )
    assert len(waiting.pending_tasks) == 9000
    assert asked == ["scontrol", "sinfo"]


def test_a_frozen_controller_may_have_taken_a_submission(
    twin_home: Path, twin: Twin, request_: BatchRequest
) -> None:
    plan = TwinPlan(name="frozen", nodes=1, gpus=0, cpu_nodes=0, message_timeout_seconds=3)
    with Twin.up(plan, twin_home) as frozen:
        scheduler = SlurmScheduler(frozen.environment)
        controller = frozen.process("slurmctld").pid
        os.kill(controller, signal.SIGSTOP)
        try:
            for ask in (
                scheduler.jobs,
                scheduler.nodes,
                lambda: scheduler.job("1"),
                lambda: scheduler.test(request_),
                lambda: scheduler.submit(replace(request_, hold=True)),
                lambda: SlurmScheduler(frozen.environment, timeout_seconds=0.5).partitions(),
            ):
                with pytest.raises(SchedulerUnreachable) as caught:
                    ask()
                assert "\n" not in str(caught.value)
        finally:
            os.kill(controller, signal.SIGCONT)
        until(
            lambda: len(scheduler.jobs(name="live")) == 1,
            "the submission that was not answered exists",
        )
        os.kill(controller, signal.SIGKILL)
        with pytest.raises(SchedulerUnreachable):
            scheduler.jobs()

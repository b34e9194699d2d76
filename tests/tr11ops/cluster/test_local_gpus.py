"""The embedded scheduler on a machine with GPUs: one node, whose jobs share it and no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.fake_gpus import lose_driver, plant_gpus
from tests.waiting import until
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import BatchRequest, JobState
from tr11ops.cluster.local import LocalScheduler, LocalSettings
from tr11ops.cluster.local_machine import claim, machine_name
from tr11ops.cluster.local_processes import with_environment
from tr11ops.cluster.local_records import simulated_nodes

Open = Callable[..., LocalScheduler]


@pytest.fixture
def open_scheduler(tmp_path: Path) -> Iterator[Open]:
    """Schedulers in folders of their own, as two users have them; nothing of them is left behind."""
    opened: list[LocalScheduler] = []

    def one(name: str, settings: LocalSettings | None = None) -> LocalScheduler:
        opened.append(
            LocalScheduler(
                tmp_path / name, replace(settings or LocalSettings(), kill_wait_seconds=2.0)
            )
        )
        return opened[-1]

    yield one
    for scheduler in opened:
        for job in scheduler.jobs():
            if not job.state.is_final:
                scheduler.cancel(job.array_id or job.job_id)
        until(lambda: not scheduler.store.active(), "all jobs have ended")  # noqa: B023  called at once
        folder = {"TR11_LOCAL_SCHEDULER": str(scheduler.store.folder)}
        until(lambda: with_environment(folder) == [], "nothing of them is left")  # noqa: B023


def submit(
    scheduler: LocalScheduler,
    told: Path,
    gpus: int,
    body: str = "exec sleep 600",
    **changes: object,
) -> str:
    """A job that writes the GPUs that it was given to a file."""
    plain = BatchRequest(
        script=f"#!/bin/bash\necho \"[$CUDA_VISIBLE_DEVICES] ${{SLURM_GPUS_ON_NODE:-0}}\" > {told}.new\n"
        f"mv {told}.new {told}\n{body}\n",
        name="gpus", nodes=1, time_limit_seconds=600, output="/dev/null", working_directory=told.parent,
        gpus_per_node=gpus,
    )  # fmt: skip
    return scheduler.submit(replace(plain, **changes))  # type: ignore[arg-type]


def given(told: Path) -> str:
    until(told.exists, f"{told.name} was written", seconds=120.0)
    return told.read_text().strip()


def waits(scheduler: LocalScheduler, job_id: str) -> None:
    def is_waiting() -> bool:
        job = scheduler.job(job_id)
        return job is not None and (job.state, job.reason) == (JobState.PENDING, "Resources")

    until(is_waiting, f"{job_id} waits for GPUs")


def test_the_machine_is_one_node_with_its_gpus(
    open_scheduler: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_gpus(tmp_path / "bin", monkeypatch, count=8)
    scheduler = open_scheduler("state")
    (node,) = scheduler.nodes()
    assert (node.name, node.gpus, node.gpu_kind) == (machine_name(), 8, "NVIDIA H100 80GB HBM3")
    assert (node.gpu_memory_megabytes, node.states, node.gpu_fault) == (
        81559,
        frozenset({"idle"}),
        "",
    )
    assert node.cpus > 0 and node.memory_megabytes > 0
    assert scheduler.partitions()[0].node_names == (machine_name(),)
    with pytest.raises(SchedulerError, match="9 GPUs per node asked for, 8 there"):
        submit(scheduler, tmp_path / "told", 9)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")  # of the shell that submits
    with pytest.raises(SchedulerError, match="3 GPUs per node asked for, 2 there"):
        submit(scheduler, tmp_path / "told", 3)


def test_slices_of_a_divided_gpu_count_each(
    open_scheduler: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = plant_gpus(tmp_path / "bin", monkeypatch, count=1, slices=7)
    scheduler = open_scheduler("state")
    (node,) = scheduler.nodes()
    assert (node.gpus, node.gpu_kind) == (7, "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    submit(scheduler, tmp_path / "told", 2, "exit 0")
    assert given(tmp_path / "told") == f"[{','.join(slices[:2])}] 2"


def test_no_two_jobs_get_the_same_gpu_whoever_submits(
    open_scheduler: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two users have a folder each, and so a queue each; a claim that a foreground training holds
    counts as well.
    """
    gpus = plant_gpus(tmp_path / "bin", monkeypatch, count=4)
    mine, theirs = open_scheduler("mine"), open_scheduler("theirs")
    first = submit(mine, tmp_path / "first", 2)
    assert given(tmp_path / "first") == f"[{gpus[0]},{gpus[1]}] 2"
    foreground = claim(gpus[2])
    assert foreground is not None and claim(gpus[0]) is None
    submit(theirs, tmp_path / "second", 1)
    assert given(tmp_path / "second") == f"[{gpus[3]}] 1"
    submit(mine, tmp_path / "none", 0, "exit 0")  # without GPUs it sees none
    assert given(tmp_path / "none") == "[] 0"
    third = submit(mine, tmp_path / "third", 1)
    waits(mine, third)
    foreground.close()
    mine.store.wake()
    assert given(tmp_path / "third") == f"[{gpus[2]}] 1"
    fourth = submit(theirs, tmp_path / "fourth", 2)
    waits(theirs, fourth)
    mine.cancel(first)
    assert given(tmp_path / "fourth") == f"[{gpus[0]},{gpus[1]}] 2"


def test_a_claim_lasts_until_nothing_of_the_task_is_left(
    open_scheduler: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gpu,) = plant_gpus(tmp_path / "bin", monkeypatch)
    scheduler = open_scheduler("state")
    job_id = submit(scheduler, tmp_path / "first", 1, "(trap '' TERM; exec sleep 600) &\nexit 0")
    given(tmp_path / "first")
    until(lambda: claim(gpu) is None, "it is claimed")
    second = submit(scheduler, tmp_path / "second", 1, "exit 0")
    assert given(tmp_path / "second") == f"[{gpu}] 1"
    job = scheduler.job(job_id)
    assert job is not None and job.state is JobState.COMPLETED
    until(lambda: (scheduler.job(second) or job).state.is_final, "it has ended")
    held: list[object] = []
    until(lambda: bool(held.append(claim(gpu)) or held[-1]), "the claim is given back")


def test_simulated_nodes_have_their_share(
    open_scheduler: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = plant_gpus(tmp_path / "bin", monkeypatch, count=4)
    scheduler = open_scheduler("state", LocalSettings(nodes=simulated_nodes(2)))
    assert [node.gpus for node in scheduler.nodes()] == [2, 2]
    submit(scheduler, tmp_path / "told", 2, nodes=2)
    assert given(tmp_path / "told") == f"[{','.join(gpus)}] 2"


def test_a_driver_that_does_not_answer_is_no_machine_without_gpus(
    open_scheduler: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_gpus(tmp_path / "bin", monkeypatch)
    scheduler = open_scheduler("state")
    lose_driver(tmp_path / "bin")
    (node,) = scheduler.nodes()
    assert node.gpus == 0 and "couldn't communicate" in node.gpu_fault
    with pytest.raises(
        SchedulerError, match=r"how many are there is not known: .*couldn't communicate"
    ):
        submit(scheduler, tmp_path / "told", 1)
    submit(scheduler, tmp_path / "told", 0, "exit 0")
    assert given(tmp_path / "told") == "[] 0"

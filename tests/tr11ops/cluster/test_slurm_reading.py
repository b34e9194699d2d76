"""Reading Slurm's answers: recorded ones of 22.05, and the shapes of newer versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tr11ops.cluster import slurm_text
from tr11ops.cluster.arrays import LARGEST_ARRAY_INDEX, task_numbers
from tr11ops.cluster.base import Job, JobState, Node

DATA = Path(__file__).parents[2] / "data" / "slurm"


def recorded() -> dict[str, Job]:
    records = slurm_text.records((DATA / "22.05" / "show-job.txt").read_text(), "JobId")
    return {job.job_id: job for job in map(slurm_text.job_from_record, records)}


def test_a_recorded_table_is_read() -> None:
    table = slurm_text.jobs_from_table((DATA / "22.05" / "squeue-table.txt").read_text())
    assert table is not None
    by_name = {job.name: job for job in table}
    assert by_name["ex it|3"].exit_code == 3
    assert by_name["signalled"].derived_exit_code == 139
    assert len(by_name["waiting"].pending_tasks) == 134


@given(st.text(alphabet="0123456789:|\x1f\n PENDING-", max_size=400))
def test_a_table_of_another_shape_is_none_at_all(text: str) -> None:
    found = slurm_text.jobs_from_table(text)
    assert found is None or all(job.raw_id.isdigit() for job in found)


def test_a_recorded_queue_says_what_happened() -> None:
    jobs = recorded()
    assert len(jobs) == 10
    by_name = {job.name: job for job in jobs.values()}
    assert by_name["finished"].state is JobState.COMPLETED
    assert by_name["finished"].nodes == tuple(f"jean-zay-iam0{number}" for number in range(1, 5))
    assert (by_name["failed"].state, by_name["failed"].exit_code) == (JobState.FAILED, 3)
    assert (by_name["killed"].state, by_name["killed"].exit_signal) == (JobState.FAILED, 9)
    assert by_name["cancelled"].state is JobState.CANCELLED
    assert by_name["node-fail"].state is JobState.NODE_FAIL
    assert by_name["node-fail"].nodes == ("jean-zay-iam03",)
    assert by_name["on-cpu"].partition == "compil"
    assert by_name["held"].pending_tasks == (1, 3, 5, 7, 9)
    assert by_name["held"].reason == "JobHeldUser"
    odd = by_name["name with  blanks = and|bars"]
    assert odd.dependency == "afterany:4_*(unfulfilled)"
    assert odd.excluded == ("jean-zay-iam02", "jean-zay-iam04")
    waiting = jobs["4_[2-10%1]"]
    assert waiting.state is JobState.PENDING
    assert waiting.pending_tasks == tuple(range(2, 11))
    assert waiting.comment == 'run = x; it\'s "one" | two'
    assert waiting.time_limit_seconds == 100 * 3600
    running = jobs["4_1"]
    assert (running.array_id, running.task_id, running.raw_id) == ("4", 1, "5")
    assert running.output == "/scratch/tr11/logs/tr11-176B-ml-4_1.out"
    assert running.exit_code is None


@pytest.mark.parametrize(
    ("state", "reason", "seen"),
    [
        ("PENDING", "None", ""),
        ("PENDING", "Resources", "Resources"),
        ("PENDING", "JobHeldAdmin", "JobHeldAdmin"),
        ("COMPLETED", "JobHeldAdmin", ""),  # it was held once, and is done
        ("FAILED", "JobLaunchFailure", "JobLaunchFailure"),  # that is how it ended
        ("TIMEOUT", "TimeLimit", "TimeLimit"),
    ],
)
def test_a_reason_is_one_that_counts_now(state: str, reason: str, seen: str) -> None:
    """Slurm's "None" is no reason, and a hold is over once the job has begun."""
    job = slurm_text.job_from_record({"JobId": "60", "JobState": state, "Reason": reason})
    assert job.reason == seen


def test_an_array_whose_waiting_tasks_were_cancelled_has_no_number_for_a_task() -> None:
    """As Slurm 22.05 shows it: no task of that number ever was."""
    record = {
        "JobId": "60",
        "ArrayJobId": "60",
        "ArrayTaskId": "4294967294",
        "JobState": "CANCELLED",
    }
    job = slurm_text.job_from_record(record)
    assert (job.job_id, job.array_id, job.task_id, job.pending_tasks) == ("60", "60", None, ())


def test_recorded_nodes_and_partitions() -> None:
    nodes = {
        node.name: node
        for node in slurm_text.nodes_from_scontrol((DATA / "22.05/show-nodes.txt").read_text())
    }
    assert len(nodes) == 7
    assert nodes["jean-zay-iam01"].gpus == 8
    assert nodes["jean-zay-iam01"].is_usable
    assert nodes["jean-zay-iam03"].states == {"down", "not_responding"}
    assert nodes["jean-zay-iam06"].states == {"idle", "drain"}
    assert nodes["jean-zay-iam06"].reason.startswith("GPU 3 fell off the bus")
    assert not nodes["jean-zay-iam06"].is_usable
    assert (nodes["jean-zay-pp01"].gpus, nodes["jean-zay-pp01"].partitions) == (0, ("compil",))
    partitions = slurm_text.partitions_from_scontrol(
        (DATA / "22.05/show-partitions.txt").read_text()
    )
    gpu, cpu = partitions
    assert (gpu.name, gpu.is_default, gpu.is_up, gpu.max_time_seconds) == (
        "gpu_p5",
        True,
        True,
        360_000,
    )
    assert len(gpu.node_names) == 6
    assert (cpu.name, cpu.is_default, cpu.node_names) == ("compil", False, ("jean-zay-pp01",))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4-04:00:00", 360_000),
        ("1:00:00", 3600),
        ("10:00", 600),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
    ],
)
def test_durations(text: str, seconds: int | None) -> None:
    assert slurm_text.duration_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("4-10%1", tuple(range(4, 11))),
        ("1,3,5-9:2", (1, 3, 5, 7, 9)),
        ("[0-2]", (0, 1, 2)),
        ("", ()),
        ("7", (7,)),
    ],
)
def test_tasks_of_an_array_expression(text: str, tasks: tuple[int, ...]) -> None:
    assert slurm_text.task_numbers(text) == tasks


@pytest.mark.parametrize("name", ["COMPLETING", "CONFIGURING", "PENDING"])
def test_states_by_their_own_names(name: str) -> None:
    assert slurm_text.job_state(name) is JobState[name]


def test_a_state_of_the_future_is_unknown() -> None:
    assert slurm_text.job_state("TRANSCENDING") is JobState.UNKNOWN
    assert not JobState.UNKNOWN.is_final


@given(st.text(alphabet="JobIdStaeTm=|: \n\t0123456789(null)", max_size=200))
def test_no_text_behind_a_job_id_breaks_the_reader(text: str) -> None:
    for record in slurm_text.records(f"JobId=7 {text}", "JobId"):
        assert isinstance(slurm_text.job_from_record(record).state, JobState)


@given(st.text(alphabet="0123456789-,:%[]²", max_size=16))
def test_no_array_expression_breaks_the_reader(text: str) -> None:
    assert len(task_numbers(text)) <= LARGEST_ARRAY_INDEX + 1


def test_the_table_of_nodes_tells_the_partitions_that_start_nothing() -> None:
    """As sinfo of 22.05 answers `--Node --Format`: a row for each node and partition."""
    size = ("64", "gpu:a100:8(S:0-1)", "500000", "a100,ib")
    drained = ("fan | 3, by hand", "1795256049", "root")
    rows = [
        ("n1", "idle+drain", "gpu", "down", *size, *drained),
        ("n1", "idle+drain", "all", "up", *size, *drained),
        (
            "c1",
            "mixed",
            "all",
            "up",
            "32",
            "(null)",
            "250000",
            "(null)",
            "none",
            "Unknown",
            "Unknown",
        ),
    ]
    text = "".join("".join(f"{value}\x1f" for value in row) + "\n" for row in rows)
    assert slurm_text.nodes_from_table(text) == (
        Node("n1", frozenset({"idle", "drain"}), "fan | 3, by hand", 64, 8, 500_000, ("gpu", "all"),
             frozenset({"a100", "ib"}), ("gpu",), gpu_kind="a100", reason_time=1795256049.0, reason_user="root"),
        Node("c1", frozenset({"mixed"}), "", 32, 0, 250_000, ("all",)),
    )  # fmt: skip
    assert slurm_text.nodes_from_table("") == ()
    assert slurm_text.nodes_from_table("another\x1fshape\x1f\n") is None

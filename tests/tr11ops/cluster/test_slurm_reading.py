"""Reading Slurm's answers: recorded ones of 22.05, and the shapes of newer versions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tr11ops.cluster import slurm_json, slurm_table, slurm_text
from tr11ops.cluster.base import Job, JobState

DATA = Path(__file__).parents[2] / "data" / "slurm"


def reply(version: str) -> dict[int, Job]:
    found = slurm_json.jobs(json.loads((DATA / version / "squeue.json").read_text()))
    return {int(job.raw_id): job for job in found}


def recorded() -> tuple[dict[str, Job], dict[str, Job], dict[str, Job]]:
    """The same queue three times: as JSON, as scontrol's records, as squeue's lines."""
    folder = DATA / "22.05"
    as_json = slurm_json.jobs(json.loads((folder / "squeue.json").read_text()))
    text = (folder / "show-job.txt").read_text()
    as_records = [slurm_text.job_from_record(record) for record in slurm_text.records(text, "JobId")]
    as_lines = slurm_text.jobs_from_squeue((folder / "squeue.txt").read_text())
    return tuple({job.job_id: job for job in jobs} for jobs in (as_json, as_records, as_lines))  # type: ignore[return-value]


def test_a_recorded_queue_is_read_alike_in_all_three_forms() -> None:
    as_json, as_records, as_lines = recorded()
    assert len(as_json) == 10
    assert as_json.keys() == as_records.keys()
    for job_id, job in as_json.items():
        assert job == as_records[job_id]
        # a line of squeue has no exit codes and no output file, and shows an array's throttle only in the id
        line = as_lines[job_id]
        for key in ("raw_id", "array_id", "task_id", "name", "user", "state", "reason", "partition", "nodes"):
            assert getattr(job, key) == getattr(line, key), (job_id, key)
        for key in ("node_count", "submit_time", "start_time", "time_limit_seconds", "comment", "dependency"):
            assert getattr(job, key) == getattr(line, key), (job_id, key)
        for key in ("excluded", "pending_tasks", "working_directory", "priority"):
            assert getattr(job, key) == getattr(line, key), (job_id, key)
        assert (line.exit_code, line.exit_signal, line.output) == (None, None, "")


def test_the_table_and_json_tell_the_same_but_for_excluded_nodes() -> None:
    folder = DATA / "22.05"
    table = slurm_table.jobs_from_table((folder / "squeue-table.txt").read_text())
    assert table is not None
    as_json = {job.raw_id: job for job in slurm_json.jobs(json.loads((folder / "squeue-table.json").read_text()))}
    for job in table:
        other = as_json.pop(job.raw_id)
        assert job == replace(other, excluded=(), output=other.output or job.output), job.name
    assert not as_json
    by_name = {job.name: job for job in table}
    assert by_name["ex it|3"].exit_code == 3
    assert by_name["signalled"].derived_exit_code == 139
    assert len(by_name["waiting"].pending_tasks) == 134


@given(st.text(alphabet="0123456789:|\x1f\n PENDING-", max_size=400))
def test_a_table_of_another_shape_is_none_at_all(text: str) -> None:
    found = slurm_table.jobs_from_table(text)
    assert found is None or all(job.raw_id.isdigit() for job in found)


def test_a_recorded_queue_says_what_happened() -> None:
    jobs, _, _ = recorded()
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


@pytest.mark.parametrize("version", ["23.02", "23.11", "24.11"])
def test_newer_dialects(version: str) -> None:
    jobs = reply(version)
    running, waiting, failed = jobs[101], jobs[100], jobs[90]
    assert running.state is JobState.RUNNING
    assert (running.job_id, running.array_id, running.task_id) == ("100_1", "100", 1)
    assert running.nodes == ("jean-zay-iam01", "jean-zay-iam02")
    assert running.time_limit_seconds == 360_000
    assert (running.submit_time, running.start_time) == (1705000000.0, 1705000100.0)
    assert running.exit_code is None
    assert running.output == "/scratch/tr11/logs/tr11-176B-ml-100_1.out"
    assert waiting.state is JobState.PENDING
    assert waiting.job_id == "100_[2-10%1]"
    assert waiting.pending_tasks == tuple(range(2, 11))
    assert waiting.start_time is None
    assert waiting.excluded == ("jean-zay-iam07",)
    assert (failed.state, failed.exit_code, failed.exit_signal) == (JobState.FAILED, 1, None)
    assert failed.derived_exit_code == 134  # a step that ended by SIGABRT
    assert failed.array_id is None
    assert failed.task_id is None
    assert failed.time_limit_seconds is None  # infinite
    assert failed.user == "alice"


def newer(value: dict[str, Any], version: str) -> dict[str, Any]:
    """A recorded job of 22.05 in the shape of a newer version, after its schema (data_parser v0.0.39, 40, 42)."""
    times = {"submit_time", "start_time", "end_time", "eligible_time", "accrue_time", "preempt_time", "suspend_time"}
    wrapped = {"array_job_id", "array_task_id", "array_max_tasks", "time_limit", "node_count", "priority", "cpus"}
    exits = {"exit_code", "derived_exit_code"}
    found = dict(value)
    for key in wrapped | (times | exits if version != "23.02" else exits):
        number = value[key]
        infinite = number == 0xFFFFFFFF
        found[key] = {"set": number is not None and not infinite, "infinite": infinite, "number": number or 0}
    if version == "23.02":
        return found
    for key in exits:
        code, signal = value[key] >> 8, value[key] & 0x7F
        found[key] = {
            "status": ["SIGNALED" if signal else "ERROR" if code else "SUCCESS"],
            "return_code": {"set": True, "infinite": False, "number": code},
            "signal": {"id": {"set": bool(signal), "infinite": False, "number": signal}, "name": ""},
        }
    found["job_state"] = [value["job_state"]]
    if version == "24.11":
        found |= {key: None for key in ("comment", "dependency", "excluded_nodes", "nodes") if not value[key]}
        if value["job_state"] == "PENDING":
            found["job_resources"] = None
    return found


@pytest.mark.parametrize("version", ["23.02", "23.11", "24.11"])
def test_a_recorded_queue_says_the_same_in_the_shapes_of_newer_versions(version: str) -> None:
    recorded_reply = json.loads((DATA / "22.05" / "squeue.json").read_text())
    reshaped = {**recorded_reply, "jobs": [newer(job, version) for job in recorded_reply["jobs"]]}
    assert slurm_json.jobs(reshaped) == slurm_json.jobs(recorded_reply)


def test_states_with_flags_and_states_of_the_future() -> None:
    assert reply("23.11")[91].state is JobState.COMPLETING
    assert reply("23.11")[92].state is JobState.CONFIGURING
    unknown = reply("24.11")[93]
    assert unknown.state is JobState.UNKNOWN
    assert not unknown.state.is_final
    assert (unknown.time_limit_seconds, unknown.node_count, unknown.array_id) == (None, 0, None)


def test_an_empty_list_with_errors_is_no_empty_queue() -> None:
    value = json.loads((DATA / "22.05" / "squeue-no-controller.json").read_text())
    assert slurm_json.jobs(value) == ()
    assert slurm_json.errors(value) == "Unspecified error: Failed while looking for jobs"


def test_recorded_nodes_and_partitions() -> None:
    nodes = {node.name: node for node in slurm_text.nodes_from_scontrol((DATA / "22.05/show-nodes.txt").read_text())}
    assert len(nodes) == 7
    assert nodes["jean-zay-iam01"].gpus == 8
    assert nodes["jean-zay-iam01"].is_usable
    assert nodes["jean-zay-iam03"].states == {"down", "not_responding"}
    assert nodes["jean-zay-iam06"].states == {"idle", "drain"}
    assert nodes["jean-zay-iam06"].reason.startswith("GPU 3 fell off the bus")
    assert not nodes["jean-zay-iam06"].is_usable
    assert (nodes["jean-zay-pp01"].gpus, nodes["jean-zay-pp01"].partitions) == (0, ("compil",))
    partitions = slurm_text.partitions_from_scontrol((DATA / "22.05/show-partitions.txt").read_text())
    gpu, cpu = partitions
    assert (gpu.name, gpu.is_default, gpu.is_up, gpu.max_time_seconds) == ("gpu_p5", True, True, 360_000)
    assert len(gpu.node_names) == 6
    assert (cpu.name, cpu.is_default, cpu.node_names) == ("compil", False, ("jean-zay-pp01",))


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("IDLE", {"idle"}),
        ("IDLE+DRAIN", {"idle", "drain"}),
        ("DOWN*", {"down", "not_responding"}),
        ("down*+drain", {"down", "drain", "not_responding"}),
        ("MIXED+COMPLETING", {"mixed", "completing"}),
        ("IDLE~", {"idle", "powered_down"}),
        ("ALLOCATED+MAINT", {"allocated", "maintenance"}),
        ("DOWN+NOT_RESPONDING", {"down", "not_responding"}),
        ("IDLE+INVALID_REG", {"idle", "inval"}),
    ],
)
def test_node_states(text: str, states: set[str]) -> None:
    assert slurm_text.node_states(text) == states


@pytest.mark.parametrize(
    ("text", "count"),
    [("(null)", 0), ("gpu:8", 8), ("gpu:a100:8(S:0-1)", 8), ("gpu:a100:4,gpu:v100:2,nic:1", 6), ("nic:2", 0)],
)
def test_gpus_of_a_node(text: str, count: int) -> None:
    assert slurm_text.gpu_count(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("4-04:00:00", 360_000), ("1:00:00", 3600), ("10:00", 600), ("UNLIMITED", None), ("Partition_Limit", None)],
)
def test_durations(text: str, seconds: int | None) -> None:
    assert slurm_text.duration_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("4-10%1", tuple(range(4, 11))), ("1,3,5-9:2", (1, 3, 5, 7, 9)), ("[0-2]", (0, 1, 2)), ("", ()), ("7", (7,))],
)
def test_tasks_of_an_array_expression(text: str, tasks: tuple[int, ...]) -> None:
    assert slurm_text.task_numbers(text) == tasks


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, (0, None)),
        (256, (1, None)),
        (9, (0, 9)),
        (None, (None, None)),
        ({"set": True, "infinite": False, "number": 768}, (3, None)),
        ({"status": "ERROR", "return_code": 3, "signal": {"signal_id": 0, "name": ""}}, (3, None)),
        ({"status": ["SIGNALED"], "return_code": 0, "signal": {"id": {"set": True, "number": 15}}}, (0, 15)),
    ],
)
def test_exit_codes_in_every_dialect(value: object, expected: tuple[int | None, int | None]) -> None:
    assert slurm_json.exit_status(value) == expected


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**33) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["set", "number", "infinite", "id", "signal", "return_code"]), inner, max_size=4
        )
    ),
    max_leaves=6,
)
KEYS = sorted(json.loads((DATA / "24.11" / "squeue.json").read_text())["jobs"][0])


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(KEYS), anything))
def test_no_shape_of_a_job_breaks_the_reader(value: dict[str, object]) -> None:
    (job,) = slurm_json.jobs({"jobs": [value]})
    assert isinstance(job.state, JobState)


@given(st.text(alphabet="0123456789-,:%[]²", max_size=16))
def test_no_array_expression_breaks_the_reader(text: str) -> None:
    assert len(slurm_text.task_numbers(text)) <= slurm_text.MAXIMUM_TASKS

"""The embedded scheduler's pure decisions, over many random cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.base.nvidia import Gpu
from tr11ops.cluster.arrays import format_ranges
from tr11ops.cluster.base import BatchRequest, JobState
from tr11ops.cluster.local_machine import (
    GpuList,
    LocalNode,
    interpreter,
    local_nodes,
    submitted_environment,
)
from tr11ops.cluster.local_records import (
    Dropped,
    LocalSettings,
    LocalSubmission,
    ProcessMark,
    TaskRecord,
    WaitingTask,
    simulated_nodes,
)
from tr11ops.cluster.local_rules import (
    JobReference,
    array_of,
    choose_nodes,
    find_job,
    has_ended,
    output_path,
    parse_dependency,
    parse_job_id,
    submission_jobs,
)

NODES = simulated_nodes(6)
FINAL = sorted(state for state in JobState if state.is_final)


def batch(**changes: object) -> BatchRequest:
    plain = BatchRequest("#!/bin/sh\n", "name", 1, 60, "%j", Path("/"))
    return replace(plain, **changes)  # type: ignore[arg-type]


def submission(job_id: int = 5, **changes: object) -> LocalSubmission:
    plain = LocalSubmission(job_id, batch(), "me", 100.0, False, None, (WaitingTask(None),))
    return replace(plain, **changes)  # type: ignore[arg-type]


@st.composite
def submissions(draw: st.DrawFn) -> LocalSubmission:
    """An array whose tasks are waiting, running, ended or dropped, in any mixture."""
    fates = draw(
        st.lists(
            st.sampled_from(["wait", "held", "out", "run", "end", "drop"]), min_size=1, max_size=12
        )
    )
    waiting, tasks, dropped = [], [], []
    for index, fate in enumerate(fates):
        if fate in {"wait", "held", "out"}:
            waiting.append(WaitingTask(index, fate == "held", NODES[:2] if fate == "out" else ()))
        elif fate == "drop":
            dropped.append(Dropped((index,), 200.0 + index))
        else:
            mark = ProcessMark(7, "1", "boot")
            record = TaskRecord(
                50 + index, index, (NODES[0],), 110.0, step=mark, batch=mark if index % 2 else None
            )
            end = {"state": draw(st.sampled_from(FINAL)), "end_time": 120.0 + index, "exit_code": 0}
            tasks.append(replace(record, **end) if fate == "end" else record)
    return submission(
        is_array=True,
        throttle=draw(st.sampled_from([None, 1, 2])),
        waiting=tuple(waiting),
        tasks=tuple(tasks),
        dropped=tuple(dropped),
        array_bounds=(0, len(fates) - 1, 1, len(fates)),
    )


# ----------------------------------------------------------------------------- syntax
@given(st.sets(st.integers(0, 3000), min_size=1, max_size=60), st.sampled_from([None, 1, 7]))
def test_an_array_is_read_back_as_it_is_written(indices: set[int], throttle: int | None) -> None:
    text = format_ranges(sorted(indices)) + (f"%{throttle}" if throttle else "")
    array = array_of(text)
    assert array.indices == tuple(sorted(indices))
    assert array.throttle == throttle


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 50))
def test_an_array_with_a_step(low: int, length: int, step: int) -> None:
    assert array_of(f"{low}-{low + length}:{step}").indices == tuple(
        range(low, low + length + 1, step)
    )


@given(st.text(alphabet="0123456789-,:%_ x?+\n", max_size=12))
def test_any_text_is_an_array_or_one_line_of_fault(text: str) -> None:
    try:
        indices = array_of(text).indices
    except SchedulerError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert indices == tuple(sorted(set(indices)))
        assert indices


@given(st.one_of(st.text(max_size=12), st.from_regex(r"\A(after|afterany)[:,?+0-9_]{0,9}\Z")))
def test_any_text_is_a_dependency_or_one_line_of_fault(text: str) -> None:
    try:
        assert parse_dependency(text)
    except SchedulerError as error:
        assert len(str(error).splitlines()) == 1


def test_dependencies_are_read() -> None:
    assert parse_dependency(None) == ()
    awaited = (JobReference(12), JobReference(13, frozenset({4})))
    assert parse_dependency("afterany:12:13_4") == awaited


def test_job_ids_are_read() -> None:
    assert parse_job_id("12") == JobReference(12, None)
    assert parse_job_id("12_3") == JobReference(12, frozenset({3}))
    assert parse_job_id("12_[4-6,9%1]") == JobReference(12, frozenset({4, 5, 6, 9}))
    assert parse_job_id("12").names(None) and parse_job_id("12").names(7)
    assert parse_job_id("12_7").names(7) and not parse_job_id("12_7").names(8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "-1",
        "1_",
        "_1",
        "1_2_3",
        "1 ",
        "1_[]",
        "1_[3-1]",
        "7; true",
        "²",
        "12345678901234567890",
    ],
)
def test_what_is_no_job_id(text: str) -> None:
    with pytest.raises(SchedulerError):
        parse_job_id(text)


# ----------------------------------------------------------------------------- records
@given(submissions())
def test_a_submission_survives_its_file(one: LocalSubmission) -> None:
    assert LocalSubmission.from_json(json.loads(json.dumps(one.to_json()))) == replace(
        one, request=replace(one.request, script="", environment={})
    )


@given(submissions())
def test_every_task_is_in_exactly_one_job(one: LocalSubmission) -> None:
    jobs = submission_jobs(one)
    count = one.array_bounds[3]
    pending = [task for job in jobs for task in job.pending_tasks]
    started = [
        job.task_id for job in jobs if not job.pending_tasks and job.state is not JobState.CANCELLED
    ]
    assert len(pending) == len(set(pending)) == len(one.waiting)
    assert not set(pending) & set(started)
    for index in range(count):
        job = find_job(one, index)
        assert job is not None
        assert (job.job_id, job.task_id, job.array_id) == (f"5_{index}", index, "5")
    assert find_job(one, count) is None
    whole = find_job(one, None)
    assert whole is not None
    assert (whole.state is JobState.PENDING) == bool(one.waiting)


# ----------------------------------------------------------------------------- decisions
@given(submissions())
def test_what_waits_may_start_once_all_that_it_names_has_ended(target: LocalSubmission) -> None:
    unfinished = {task.task_id for task in (*target.waiting, *target.running)}
    assert has_ended(JobReference(5), target) == (not unfinished)
    for number in range(target.array_bounds[3]):
        assert has_ended(JobReference(5, frozenset({number})), target) == (number not in unfinished)
    assert has_ended(JobReference(5), None)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sets(st.sampled_from(NODES), max_size=3), st.booleans()),
        max_size=4,
    ),
    st.sets(st.sampled_from(NODES), max_size=4),
    st.integers(1, 6),
    st.integers(0, 5),
)
def test_nodes_are_chosen_free_allowed_and_in_turn(
    others: list[tuple[int, set[str], bool]], excluded: set[str], wanted: int, fewer: int
) -> None:
    least = max(1, wanted - fewer)
    peers = [
        submission(
            job_id + 10 * number,
            waiting=(WaitingTask(None),) if waits else (),
            reason="Resources" if waits else "",
            tasks=(TaskRecord(1, None, tuple(busy), 1.0),),
        )
        for number, (job_id, busy, waits) in enumerate(others)
    ]
    us = submission(20, request=batch(nodes=wanted, least_nodes=least))
    settings = LocalSettings(nodes=NODES)
    placement = choose_nodes(
        us, WaitingTask(None, excluded=tuple(excluded)), peers, local_nodes(settings, GpuList())
    )
    chosen, reason = placement.nodes, placement.reason
    busy = {node for _, nodes, _ in others for node in nodes}
    free = set(NODES) - busy - excluded
    earlier_waits = any(peer.job_id < 20 and peer.waiting for peer in peers)
    if chosen:
        assert least <= len(chosen) == len(set(chosen)) <= wanted
        assert set(chosen) <= free
        assert not earlier_waits and len(chosen) == min(wanted, len(free))
    elif len(free) < least:
        assert reason == "Resources"
    else:
        assert (reason, earlier_waits) == ("Priority", True)


GPUS = tuple(
    Gpu(f"GPU-{number}", "NVIDIA H100 80GB HBM3", str(number), 81559) for number in range(4)
)
MACHINE = (LocalNode("host", cpus=8, memory_megabytes=1, gpus=GPUS),)


def running(*gpus: str, cpus: int = 1, job_id: int = 1) -> LocalSubmission:
    task = TaskRecord(job_id, None, ("host",), 1.0, gpus=gpus)
    request = batch(gpus_per_node=len(gpus), cpus_per_task=cpus)
    return submission(job_id, request=request, waiting=(), tasks=(task,))


@pytest.mark.parametrize(
    ("others", "taken", "wants", "expected"),
    [
        ((), (), {"gpus_per_node": 2}, ("GPU-0", "GPU-1")),
        ((running("GPU-1"),), (), {"gpus_per_node": 2}, ("GPU-0", "GPU-2")),
        ((running("GPU-1"),), ("GPU-0",), {"gpus_per_node": 2}, ("GPU-2", "GPU-3")),
        ((running("GPU-1"),), ("GPU-0",), {"gpus_per_node": 3}, "Resources"),
        ((running("GPU-0", cpus=6),), (), {"gpus_per_node": 1, "cpus_per_task": 4}, "Resources"),
        ((running("GPU-0", cpus=6),), (), {"gpus_per_node": 1, "cpus_per_task": 2}, ("GPU-1",)),
        ((running(cpus=6), running(cpus=2, job_id=2)), (), {}, "Resources"),
        ((), (), {"cpus_per_task": 99}, ()),  # as many cores as there are
        ((running(),), (), {"cpus_per_task": 99}, "Resources"),
        (
            (submission(1, request=batch(gpus_per_node=3), reason="Resources"),),
            (),
            {"gpus_per_node": 2},
            "Priority",
        ),
        (
            (submission(1, request=batch(gpus_per_node=3), reason="Resources"),),
            (),
            {"gpus_per_node": 1},
            ("GPU-3",),
        ),
    ],
)
def test_jobs_share_the_machine_and_no_gpu(
    others: tuple[LocalSubmission, ...],
    taken: tuple[str, ...],
    wants: dict[str, int],
    expected: tuple[str, ...] | str,
) -> None:
    found = choose_nodes(
        submission(20, request=batch(**wants)), WaitingTask(None), others, MACHINE, taken
    )
    if isinstance(expected, str):
        assert (found.nodes, found.reason) == ((), expected)
    else:
        assert (found.nodes, found.gpus) == (("host",), expected)


def test_simulated_nodes_share_out_the_gpus() -> None:
    nodes = local_nodes(LocalSettings(nodes=NODES[:2]), GpuList(GPUS))
    us = submission(request=batch(nodes=2, gpus_per_node=1))
    assert choose_nodes(us, WaitingTask(None), (), nodes).gpus == ("GPU-0", "GPU-2")
    pretended = local_nodes(LocalSettings(nodes=NODES[:2], gpus_per_node=4), GpuList(GPUS))
    assert [node.gpu_count for node in pretended] == [4, 4]
    found = choose_nodes(us, WaitingTask(None), (), pretended)
    # nothing stands behind them: no device is given
    assert (found.nodes, found.gpus) == (NODES[:2], ())


# ---------------------------------------------------------------------- what a task is started with
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("%x-%j.out", "name-57.out"),
        ("%A_%a.log", "5_7.log"),
        ("%3a/%6j", "007/000057"),
        ("100%%", "100%"),
        ("%u@%N %q %", "me@local-node1 %q %"),
        ("/tmp/%x", "/tmp/name"),
        ("%12", "%12"),
    ],
)
def test_output_patterns(pattern: str, expected: str) -> None:
    array = submission(is_array=True, request=batch(output=pattern))
    assert output_path(array, TaskRecord(57, 7, NODES[:1], 1.0)) == str(Path("/") / expected)


def test_output_patterns_before_the_start() -> None:
    request = batch(output="%x-%A-%j-%a-%N")
    assert output_path(submission(is_array=True, request=request)) == "/name-5-%j-%a-%N"
    assert output_path(submission(request=request)) == "/name-5-5-4294967294-%N"


@pytest.mark.parametrize(
    ("first", "command"),
    [
        ("#!/bin/bash", ["/bin/bash"]),
        ("#! /usr/bin/env -S python3 -u  ", ["/usr/bin/env", "-S python3 -u"]),
        ("#!", ["/bin/sh"]),
    ],
)
def test_the_interpreter_is_the_first_lines(tmp_path: Path, first: str, command: list[str]) -> None:
    script = tmp_path / "script"
    script.write_text(first + "\necho\n")
    assert interpreter(script) == [*command, str(script)]


def test_a_job_does_not_inherit_the_job_that_submits_it() -> None:
    outer = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "7",
        "SBATCH_ACCOUNT": "a",
        "SLURM_CONF": "/c",
        "WORD": "old",
    }
    inner = submitted_environment(batch(environment={"WORD": "new"}), outer)
    assert inner == {"PATH": "/bin", "SLURM_CONF": "/c", "WORD": "new"}

"""The record of phases: one line a change, none lost to a torn line, and never in the training's
way.
"""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import astuple, replace

from trainer.contract.attempt import PHASES, AttemptIdentity, PhaseRecord, PhaseWriter, read_phases
from trainer.contract.compute_record import (
    FIRST_STEPS,
    USUAL_STEPS,
    ComputeRecord,
    ComputeTimes,
    RankPosition,
)
from trainer.contract.metrics_record import (
    LONGEST_LINE,
    MeasuredStep,
    StepRecord,
    parse_record,
    records,
)
from trainer.contract.paths import RunPaths
from trainer.control.lifecycle import HeartbeatWriter


def never(line: str) -> None:
    raise AssertionError(f"nothing is wrong, but it said: {line}")


def test_rank_zero_records_each_change_once_and_no_other_does(tmp_path):
    paths, now = RunPaths(tmp_path, "run", "main"), [100.0]
    for rank in (0, 1):
        beats = HeartbeatWriter(paths, rank, f"job-{rank}", clock=lambda: now[0], launch=3)
        for phase, iteration in (
            ("starting", 0),
            ("training", 7),
            ("training", 8),
            ("saving", 8),
            ("training", 8),
        ):
            now[0] += 2.0  # beyond the second within which a heartbeat is not repeated
            beats.beat(phase, iteration)
        beats.end_now(0)
    assert read_phases(paths.phases("job-0")) == (
        PhaseRecord(102.0, "starting", 0, 3),
        PhaseRecord(104.0, "training", 7, 3),
        PhaseRecord(108.0, "saving", 8, 3),
        PhaseRecord(110.0, "training", 8, 3),
        PhaseRecord(110.0, "ended", 8, 3),
    )
    assert not paths.phases("job-1").exists()


def test_a_line_that_a_killed_launch_left_costs_that_line_alone(tmp_path):
    path = tmp_path / "phases.jsonl"
    first = PhaseWriter(path, 1, never)
    first.enter("starting", 0, 1.0)
    first.enter("training", 0, 2.0)
    path.write_bytes(path.read_bytes()[:-9])
    second = PhaseWriter(path, 2, never)
    second.enter("starting", 0, 3.0)
    second.enter("loading", 0, 4.0)
    assert [(entry.launch, entry.phase) for entry in read_phases(path)] == [
        (1, "starting"), (2, "starting"), (2, "loading"),
    ]  # fmt: skip


def test_a_refusing_file_system_is_told_once_and_tried_again(tmp_path):
    path, said = tmp_path / "folder" / "phases.jsonl", list[str]()
    path.mkdir(parents=True)  # a folder in its place: refused for every user
    writer = PhaseWriter(path, 1, said.append)
    writer.enter("starting", 0, 1.0)
    writer.enter("loading", 0, 2.0)
    assert len(said) == 1
    path.rmdir()
    writer.enter("training", 5, 3.0)
    assert read_phases(path) == (PhaseRecord(3.0, "training", 5, 1),)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_full_disk_does_not_stop_a_training(tmp_path):
    (tmp_path / "phases.jsonl").symlink_to("/dev/full")
    said: list[str] = []
    PhaseWriter(tmp_path / "phases.jsonl", 1, said.append).enter("starting", 0, 1.0)
    assert len(said) == 1 and "No space left" in said[0]


def test_the_file_can_be_written_by_the_group(tmp_path):
    before = os.umask(0o002)
    try:
        PhaseWriter(tmp_path / "phases.jsonl", 1, never).enter("starting", 0, 1.0)
    finally:
        os.umask(before)
    assert (tmp_path / "phases.jsonl").stat().st_mode & 0o777 == 0o664


def test_no_file_is_no_phase_and_a_folder_is_an_error(tmp_path):
    assert read_phases(tmp_path / "none.jsonl") == ()
    with pytest.raises(OSError):
        read_phases(tmp_path)


@settings(max_examples=40, deadline=None)
@given(garbage=st.lists(st.binary(max_size=40)))
def test_garbage_between_records_is_left_out(tmp_path_factory, garbage):
    path = tmp_path_factory.mktemp("phases") / "phases.jsonl"
    kept = [PhaseRecord(float(index), PHASES[index], index, 1) for index in range(3)]
    writer = PhaseWriter(path, 1, never)
    for index, record in enumerate(kept):
        writer.enter(record.phase, record.iteration, record.time)
        with path.open("ab") as stream:
            for piece in garbage[index::3]:
                stream.write(piece.replace(b"{", b"") + b"\n")
    assert read_phases(path) == tuple(kept)


# ----------------------------------------------------------------------------- compute record
# What a rank leaves of its own compute times: the last steps, and what was usual on it at first.


def test_what_is_usual_is_of_the_steps_after_the_first_ones_and_stays(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    record = ComputeRecord(
        paths, AttemptIdentity("12", 1, paths.stop_request("12")), 0, RankPosition(0, 0)
    )

    def after(iteration: int) -> ComputeTimes:
        found = ComputeTimes.read(paths.compute("12", 0))
        assert found is not None and found.iteration == iteration
        return found

    for iteration in range(1, FIRST_STEPS + USUAL_STEPS + 31):
        seconds = (
            9.0
            if iteration <= FIRST_STEPS
            else 2.0
            if iteration <= FIRST_STEPS + USUAL_STEPS
            else 6.0
        )
        record.add(iteration, {"forward": seconds / 2, "backward": seconds / 2})
        if iteration == USUAL_STEPS:
            assert after(iteration).usual is None, "it is not known yet"
    last = after(FIRST_STEPS + USUAL_STEPS + 30)
    assert (last.usual, set(last.recent)) == (2.0, {6.0})


# ----------------------------------------------------------------------------- metrics record
# What a line of metrics.jsonl says, by one rule, and that every reader goes by it.

FULL = StepRecord(7, 100, 700, 7000, 1.5, 1e-4, 100, 2.5, 0.3, 66.0, 150.0)
READ = MeasuredStep(*astuple(FULL))


def line(**changes: Any) -> str:
    return json.dumps({"kind": "step", **FULL.values(), "time": 50.0, "job_id": "12", **changes})


@pytest.mark.parametrize("others", [(), (("sop", 0.5), ("other", 2.0))], ids=str)
def test_a_step_is_read_back_whole(others: tuple[tuple[str, float], ...]) -> None:
    full = replace(FULL, other_losses=others)
    record = parse_record(line(**full.values()))
    assert record is not None and record.is_step
    assert (record.step(), record.time, record.job_id) == (
        replace(READ, other_losses=others),
        50.0,
        "12",
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "null", line()[:-1], "[" * 5000, '{"kind": 5}', '{"kind": null}']
)
def test_a_cut_line_and_what_is_no_table_are_no_record(text: str) -> None:
    assert parse_record(text) is None
    assert parse_record(text.encode()) is None


def test_keys_that_no_one_knows_change_nothing() -> None:
    record = parse_record(line(color="blue", iteration_of_moon=4))
    assert record is not None and record.step() == READ


def test_without_a_kind_it_is_a_step() -> None:
    record = parse_record(json.dumps({"iteration": 3, "time": 1.0}))
    assert record is not None and record.is_step and record.iteration == 3


def test_a_step_that_tells_nothing_but_its_number_and_time_is_one() -> None:
    record = parse_record(json.dumps({"kind": "step", "iteration": 3, "time": 1.0}))
    step = None if record is None else record.step()
    assert step is not None and step.iteration == 3
    counts = (step.total_iterations, step.consumed_samples, step.consumed_tokens)
    assert (*counts, step.global_batch_size, step.lm_loss, step.grad_norm) == (None,) * 6
    numbers = (step.seconds_per_iteration, step.learning_rate, step.samples_per_second)
    assert all(math.isnan(number) for number in (*numbers, step.tflops))
    assert not step.has_bad_loss, "no loss is told, which is no loss that went wrong"


@pytest.mark.parametrize(("loss", "is_bad"), [(None, True), (2.5, False)])
def test_a_loss_that_is_told_and_no_number_is_bad(loss: float | None, is_bad: bool) -> None:
    record = parse_record(json.dumps({"iteration": 3, "time": 1.0, "lm_loss": loss}))
    step = None if record is None else record.step()
    assert step is not None and step.has_bad_loss is is_bad


@pytest.mark.parametrize(
    "value", ["null", "NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400]
)
def test_what_is_not_finite_is_nan_and_no_count(value: str) -> None:
    record = parse_record(line(lm_loss="@", time="@", iteration="@").replace('"@"', value))
    assert record is not None
    assert math.isnan(record.number("lm_loss")) and record.time is None and record.iteration is None
    assert not record.is_step and record.step() is None


@pytest.mark.parametrize("value", ["7", True, [7], {"n": 7}, -1])
def test_only_a_number_counts(value: Any) -> None:
    record = parse_record(line(iteration=value))
    assert record is not None and record.iteration is None and record.step() is None
    assert value == -1 or math.isnan(record.number("iteration"))


def test_a_loss_that_was_null_stays_a_step() -> None:
    record = parse_record(line(lm_loss=None, grad_norm=None, num_zeros=None))
    found = None if record is None else record.step()
    assert found is not None and math.isnan(found.lm_loss)
    assert replace(found, lm_loss=2.5) == replace(READ, grad_norm=None)


def test_a_file_gives_its_whole_lines_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert list(records(path)) == []
    rows = [line(iteration=5), "torn {", line(iteration=6), line(iteration=5, lm_loss=2.0)]
    path.write_bytes(b"\xff\xfe\n" + "\n".join(rows).encode() + b"\n" + line(iteration=6).encode())
    found = [(record.iteration, record.number("lm_loss")) for record in records(path)]
    assert found == [(5, 2.5), (6, 2.5), (5, 2.0)], (
        "in the order of training; the last line is being written"
    )


def test_a_line_without_an_end_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as stream:
        stream.truncate(16 * LONGEST_LINE)  # a hole: no disk is used
        stream.seek(0, 2)
        stream.write(b"\n" + line().encode() + b"\n")
    tracemalloc.start()
    found = list(records(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [record.iteration for record in found] == [7]
    assert peak < 6 * LONGEST_LINE


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    record = parse_record(data)
    assert record is None or record.step() is None or record.is_step

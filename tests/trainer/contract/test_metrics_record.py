"""What a line of metrics.jsonl says, by one rule, and that every reader goes by it."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trainer.contract.metrics_record import LONGEST_LINE, StepRecord, parse_record, records

FULL = StepRecord(7, 100, 700, 7000, 1.5, 1e-4, 100, 2.5, 0.3, 66.0, 150.0)


def line(**changes: Any) -> str:
    return json.dumps({"kind": "step", **FULL.values(), "time": 50.0, "job_id": "12", **changes})


@pytest.mark.parametrize("others", [(), (("sop", 0.5), ("other", 2.0))], ids=str)
def test_a_step_is_read_back_whole(others: tuple[tuple[str, float], ...]) -> None:
    full = replace(FULL, other_losses=others)
    record = parse_record(line(**full.values()))
    assert record is not None and record.is_step
    assert (record.step(), record.time, record.job_id) == (full, 50.0, "12")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "null", line()[:-1], "[" * 5000, '{"kind": 5}', '{"kind": null}']
)
def test_a_cut_line_and_what_is_no_table_are_no_record(text: str) -> None:
    assert parse_record(text) is None
    assert parse_record(text.encode()) is None


def test_keys_that_no_one_knows_change_nothing() -> None:
    record = parse_record(line(color="blue", iteration_of_moon=4))
    assert record is not None and record.step() == FULL


def test_without_a_kind_it_is_a_step() -> None:
    record = parse_record(json.dumps({"iteration": 3, "time": 1.0}))
    assert record is not None and record.is_step and record.iteration == 3
    assert record.step() is None, "the trainer's counters are not there"


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
    assert replace(found, lm_loss=2.5) == replace(FULL, grad_norm=None)


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

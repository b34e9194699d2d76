"""What of `metrics.jsonl` counts: each iteration once, also after a resume, in whatever pieces it is
read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.tr11ops.trackers.metrics_files import line, validation
from tr11ops.trackers.points import course_from


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def losses(path: Path, begin: int = 0) -> dict[int, float]:
    return {point.iteration: point.values["lm_loss"] for point in course_from(path, begin).points()}


def test_what_was_trained_again_replaces_what_was_there(tmp_path: Path) -> None:
    again = [line(step, 2.0) for step in (3, 4)]
    path = write(tmp_path / "m", *(line(step, 1.0) for step in range(1, 6)), *again)
    assert losses(path) == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
    assert course_from(path, 0).lowest == 1


def test_an_evaluation_stands_with_its_step_and_under_its_name(tmp_path: Path) -> None:
    path = write(tmp_path / "m", line(1, 1.0), validation(1, 3.0), line(2, 1.0))
    first, second = course_from(path, 0).points()
    assert first.values["valid/lm_loss"] == 3.0
    assert (first.has_step, "valid/lm_loss" in second.values) == (True, False)


def test_no_number_is_no_point(tmp_path: Path) -> None:
    odd = {"iteration": 7, "time": 1.0, "lm_loss": None, "a": True, "b": "x", "c": math.inf, "d": 2}
    path = write(tmp_path / "m", json.dumps(odd) + "\n")
    (point,) = course_from(path, 0).points()
    assert dict(point.values) == {"d": 2.0}


@pytest.mark.parametrize(
    "cut", ["", '{"iteration": 3, "ti', "no json\n", '{"kind": "step"}\n', "\x00\n"]
)
def test_what_is_being_written_or_damaged_is_left(tmp_path: Path, cut: str) -> None:
    path = write(tmp_path / "m", line(1, 1.0), line(2, 1.0), cut)
    assert list(losses(path)) == [1, 2]
    end = course_from(path, 0).end
    with path.open("a") as stream:
        stream.write(("\n" if not cut.endswith("\n") else "") + line(3, 1.0))
    assert list(losses(path, end)) == [3]


def test_a_file_that_was_replaced_by_a_shorter_one_is_read_from_its_beginning(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "m", line(1, 5.0))
    assert losses(path, begin=10_000) == {1: 5.0}


@given(st.lists(st.integers(1, 6), max_size=30), st.data())
def test_each_iteration_counts_as_it_was_last_trained(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("m") / "m"
    write(path, *(line(step, float(number)) for number, step in enumerate(steps)))
    expected: dict[int, float] = {}
    for number, step in enumerate(steps):
        expected = {key: value for key, value in expected.items() if key < step}
        expected[step] = float(number)
    assert losses(path) == expected

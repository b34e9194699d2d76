"""Times, ranges and ranks as people type them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tr11ops.base.units import since
from tr11ops.logs.show import LAST_ITERATION, iterations, numbers, steps_since

NOON = time.mktime((2022, 5, 2, 12, 0, 0, 0, 0, -1))


def test_times() -> None:
    assert since("90s", NOON) == NOON - 90
    assert since("2h", NOON) == since("2 h ago", NOON) == NOON - 7200
    assert since("1.5d", NOON) == NOON - 1.5 * 86400
    assert since("11:30", NOON) == NOON - 1800
    assert since("12:30", NOON) == NOON - 23.5 * 3600  # yesterday
    assert since("2022-05-02", NOON) == NOON - 12 * 3600
    assert since("2022-05-02 11:59:30", NOON) == NOON - 30
    assert since("2022-05-02T10:00:00+00:00", NOON) == 1651485600.0


@pytest.mark.parametrize(
    "text", ["", "yesterday", "25:00", "2022-13-01", "-2h", "9" * 400 + "h", "2h30"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        since(text, NOON)


def test_ranges() -> None:
    assert iterations("100:200") == (100, 200)
    assert iterations("100:") == (100, LAST_ITERATION)
    assert iterations(":200") == (0, 200)
    assert iterations("7") == (7, 7)
    assert iterations("100-200") == (100, 200) and iterations("100-") == (100, LAST_ITERATION)
    for text in (":", "-", "", "a:b", "200:100", "200-100", "1:2:3"):
        with pytest.raises(ValueError, match="range"):
            iterations(text)
    assert numbers("0,8") == {0, 8} and numbers("0-3,9") == {0, 1, 2, 3, 9}
    for text in ("", "-1", "3-1", "a", "0-9999999", "1,,2"):
        with pytest.raises(ValueError, match="ranks"):
            numbers(text)


def test_steps_since_a_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [
        {"kind": "step", "iteration": number, "time": 1000.0 + number} for number in range(9000)
    ]
    lines = [json.dumps(record) for record in records]
    lines.insert(8990, json.dumps({"kind": "validation", "time": 9995.0}))
    path.write_text("\n".join(lines) + '\n{"kind": "step", "ti')
    assert steps_since(path, 1000.0 + 8995) == 5
    assert steps_since(path, 0.0) == 9000
    assert steps_since(path, 1e12) == 0
    assert steps_since(tmp_path / "none", 0.0) is None

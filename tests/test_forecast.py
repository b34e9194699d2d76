"""The forecast of a step on an H100: its tables in RESULTS.md are those that its script makes of
today's code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def forecast(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import forecast

    return forecast


def test_the_tables_are_of_this_code(forecast: Any) -> None:
    """A change that moves more or less bytes, or other products: run `python
    benchmarks/forecast.py`.
    """
    kept = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    begin, end = forecast.MARKS
    assert forecast.tables() == kept.partition(begin)[2].partition(end)[0].strip()


def test_what_was_measured_then_comes_out_again(forecast: Any) -> None:
    """54.5 % and 683 TFLOPs were measured beside the milliseconds from which all else is reckoned."""
    assert forecast.share(forecast.FIRST.step) == pytest.approx(54.5, abs=0.05)
    assert 1000 * forecast.flops_of_a_step() / forecast.FIRST.step_in_float8 == pytest.approx(
        683, abs=1
    )

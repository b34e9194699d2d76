"""A run kept in the name of a trainer that tells little: whatever its steps leave out, every command
answers, and no number is made up for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.pins.screens import LOCAL, SINCE, taken
from tests.pins.states import Place, place_in

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("status", *LOCAL),
    ("pulse", "--dry-run", *LOCAL),
    ("goodput",),
    ("handover", *SINCE, "--dry-run", *LOCAL),
    ("report", "-o", "-", *LOCAL),
    ("logs", "--summary"),
    ("logs", "--lines", "3"),
)
MADE_UP = re.compile(r"\b(nan|NaN|None|inf)\b|\b0 (tokens|samples)\b|/ 0\b|ETA +\d|Traceback")
TOLD: dict[str, st.SearchStrategy[Any]] = {
    "lm_loss": st.floats(1.0, 9.0),
    "grad_norm": st.floats(0.1, 2.0),
    "learning_rate": st.floats(1e-5, 1e-3),
    "seconds_per_iteration": st.floats(0.3, 0.6),
}
STEPS = st.lists(
    st.fixed_dictionaries({}, optional=TOLD), min_size=1, max_size=12
)  # what is told beside the number and the time, from the last step back


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with place_in("foreign") as found:
        yield found


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS)
def test_nothing_is_made_up_for_what_is_not_told(place: Place, told: list[dict[str, Any]]) -> None:
    [metrics] = place.run.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    own = ("kind", "iteration", "time", "job_id")
    lines = [{name: line[name] for name in own} for line in lines]
    for line, more in zip(reversed(lines), told, strict=False):
        line.update(more)
    place.write(metrics, "".join(json.dumps(line) + "\n" for line in lines))
    for words in COMMANDS:
        shown = taken(place, words)
        assert shown.endswith("--- exit code 0\n"), shown
        page = re.sub(r"<script.*?</script>|<style.*?</style>", "", shown, flags=re.DOTALL)
        assert MADE_UP.search(page) is None, (words, MADE_UP.search(page))
    shown = taken(place, ("status", "--json", *LOCAL))
    status = json.loads(shown[shown.index("{") : shown.rindex("}") + 1])
    for name in ("total_iterations", "finish", "consumed_samples", "consumed_tokens"):
        assert status[name] is None, name
    losses = [more["lm_loss"] for more in told if "lm_loss" in more]
    assert status["loss"] == (losses[0] if losses else None)
    assert status["iteration"] == lines[-1]["iteration"]
    assert "loss-not-finite" not in shown

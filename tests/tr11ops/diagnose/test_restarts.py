"""Whether a plain restart helps, by class of cause: minimal logs in the words of public reports."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.diagnose.diagnose_logs import SHORT_STEPS, of_text

FILE = Path(__file__).parents[2] / "data" / "diagnose_restarts" / "logs.toml"
LOGS: list[dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))["log"]


@pytest.mark.parametrize("log", LOGS, ids=[log["kind"] for log in LOGS])
def test_a_kind_of_end_tells_whether_the_same_again_helps(
    tmp_path: Path, log: dict[str, Any]
) -> None:
    steps = SHORT_STEPS if log.get("trained", False) else "starting\n"
    found = of_text(tmp_path, steps + log["text"].lstrip("\n"))
    assert found.restart.answer.value in log["restarts"], (
        found.fault.value,
        found.step.value,
        found.restart,
    )

"""Lines of `metrics.jsonl`, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

BEGAN = 1_700_000_000.0


def line(iteration: int, loss: float) -> str:
    """A step that was logged `iteration` minutes after BEGAN."""
    value = {
        "kind": "step",
        "iteration": iteration,
        "time": BEGAN + 60 * iteration,
        "job_id": "7",
        "lm_loss": loss,
        "learning_rate": 1e-4,
        "total_iterations": 100,
    }
    return json.dumps(value) + "\n"


def validation(iteration: int, loss: float) -> str:
    """An evaluation after that step."""
    value = {
        "kind": "validation",
        "name": "valid",
        "iteration": iteration,
        "time": BEGAN + 60 * iteration + 30,
        "lm_loss": loss,
    }
    return json.dumps(value) + "\n"


def append(path: Path, lines: Iterable[str]) -> None:
    """Add lines to a file, which is made with its folder where it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.writelines(lines)

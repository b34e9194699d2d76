"""What a run's own records say of its speed: seconds of a step, of its longest save and of its longest evaluation."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tr11ops.evidence import tail_lines
from trainer.contract import RunPaths

TAIL_BYTES = 4 << 20  # some weeks of the largest run's log, whose steps take minutes
RECENT_STEPS = 100
_SAVE = re.compile(r"time \(ms\) \| save-checkpoint: (?P<milliseconds>\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class RunHistory:
    """Measured times, in seconds; None where the run has no record of it.

    `step`: the median of the recent ones, at `step_iteration` (the last that was logged). `save` and `evaluation`: the
    longest. A save that runs beside the training is timed from its begin to its end.
    """

    step: float | None = None
    step_iteration: int | None = None
    save: float | None = None
    evaluation: float | None = None


def read_history(paths: RunPaths) -> RunHistory:
    """Read the ends of both logs; what is not there was not measured. Raises OSError as the file system does."""
    saves = [float(match["milliseconds"]) / 1000 for line in _tail(paths.main_log) if (match := _SAVE.search(line))]
    records = [record for line in _tail(paths.metrics) if (record := _record(line)) is not None]
    steps = [record for record in records if record.get("kind", "step") == "step"]
    told = [record.get("seconds_per_iteration") for record in steps]
    seconds = [float(value) for value in told if isinstance(value, int | float)]
    last = steps[-1].get("iteration") if steps else None
    return RunHistory(
        step=median(seconds[-RECENT_STEPS:]) if seconds else None,
        step_iteration=last if isinstance(last, int) else None,
        save=max(saves, default=None),
        evaluation=_longest_evaluation(records),
    )


def _longest_evaluation(records: list[dict[str, Any]]) -> float | None:
    """From the record of a step to the last of the validation records that follow it at once, in the same job.

    A save comes before the evaluation; where it does not run beside the training, it is counted in.
    """
    longest: float | None = None
    began: float | None = None
    for before, record in pairwise(records):
        if record.get("kind") != "validation" or record.get("job_id") != before.get("job_id"):
            continue
        if before.get("kind", "step") != "validation":
            began = _time(before) if before.get("kind", "step") == "step" else None
        ended = _time(record)
        if began is not None and ended is not None:
            longest = max(longest or 0.0, ended - began)
    return longest


def _time(record: dict[str, Any]) -> float | None:
    value = record.get("time")
    return float(value) if isinstance(value, int | float) else None


def _record(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _tail(path: Path) -> list[str]:
    try:
        return tail_lines(path, TAIL_BYTES)[0]
    except FileNotFoundError:
        return []

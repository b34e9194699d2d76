"""Every reader of metrics.jsonl understands the same lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from tr11ops.goodput.history import read_metrics
from tr11ops.hub.upload import read_losses
from tr11ops.launch.margins import read_history
from tr11ops.logs.show import steps_since
from tr11ops.observe.files import progress_at, read_steps
from tr11ops.report.series import read_series
from tr11ops.status.extra_observations import best_rates
from trainer.contract.metrics_record import StepRecord
from trainer.contract.paths import RunPaths

STEPS = 8


def step(number: int, **changes: Any) -> dict[str, Any]:
    record = StepRecord(number, 100, 8 * number, 80 * number, 1.5, 1e-4, 8, 2.5, 0.3, 5.0, 150.0)
    return {
        "kind": "step",
        **to_builtins(record),
        "time": 1000.0 + number,
        "job_id": "12",
        **changes,
    }


def test_where_the_readers_differed(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "demo", "main")
    paths.logs.mkdir(parents=True)
    old = step(STEPS)
    del old["kind"]  # the report left such a step out
    lines = [
        *(step(number) for number in range(1, STEPS)),
        old,
        step(90, iteration=-1),  # all but one took it for a step
        step(91, iteration="91"),  # most took the text for a number
        step(92, iteration=True),
        {"kind": 5, "iteration": 93, "time": 1093.0},
    ]
    half = json.dumps(step(94))  # goodput and the report took a line that was being written
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in lines) + half)
    observed = read_steps(paths)
    assert isinstance(observed, tuple) and [each.record.iteration for each in observed] == [
        *range(1, STEPS + 1)
    ]
    assert [mark.iteration for mark in read_metrics(paths.metrics)] == [*range(1, STEPS + 1)]
    series = read_series(paths.metrics)
    assert series.total == STEPS and series.points[-1].iteration == STEPS
    last = progress_at(paths.metrics, 1e9)
    assert last is not None and last.iteration == STEPS
    assert steps_since(paths.metrics, 0.0) == STEPS
    assert read_history(paths).step_iteration == STEPS
    assert best_rates(paths) == (150.0, 5.0)
    assert (
        read_losses(paths.metrics, STEPS).train == 2.5
        and read_losses(paths.metrics, 94).train is None
    )

"""The usual time of a step is the same to all that ask: the status, the remote one, a launch, the
account.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from msgspec import to_builtins

from tests.tr11ops.status_cases import NOW, record, snapshot
from tr11ops.goodput.history import read_metrics
from tr11ops.hub.log_end import end_of_log
from tr11ops.launch.margins import read_history
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Step
from trainer.contract.metrics_record import format_step
from trainer.contract.paths import RunPaths


@pytest.mark.parametrize(
    ("told", "usual"),
    [
        ([2.0] * 5, 2.0),
        ([2.0, math.nan, 2.0], 2.0),
        ([2.0, 0.0, 0.0, -1.0, 2.0], 2.0),  # a launch counted these
        ([2.0, math.inf, math.inf], 2.0),  # and these
        ([2.0, 1e300, 1e300], 2.0),  # the remote status too, and forecast an end beyond all dates
        ([9.0] * 60 + [2.0, 2.0, 2.0, 9.0] * 10, 9.0),  # the remote status looked at fewer steps
        ([9.0] * 60 + [2.0] * 9, 9.0),
        ([9.0] * 60 + [2.0] * 40, 2.0),  # ten in a row are the pace of now
        ([9.0] * 200 + [2.0] * 100, 2.0),
        ([math.nan], None),
    ],
)
def test_every_reader_finds_the_same_usual_step(
    told: list[float], usual: float | None, tmp_path: Path
) -> None:
    records = [record(n, seconds_per_iteration=seconds) for n, seconds in enumerate(told, 1)]
    assert (
        derived.seconds_per_iteration(snapshot(steps=tuple(Step(one) for one in records))) == usual
    )
    log = "".join(f"{format_step(one)}\n" for one in records).encode()
    assert end_of_log(log, len(log), True).seconds_per_iteration == usual
    paths = RunPaths(tmp_path, "demo", "main")
    paths.logs.mkdir(parents=True)
    rows = [
        {"kind": "step", **to_builtins(one), "time": NOW + one.iteration, "job_id": "7"}
        for one in records
    ]
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_history(paths).step == usual
    counted = [step.seconds for step in read_metrics(paths.metrics)]
    assert all(seconds is None or 0 < seconds < 1e8 for seconds in counted)

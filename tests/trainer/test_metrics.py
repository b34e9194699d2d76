"""Metrics on a disk that refuses them: said once, and the training goes on; NaN stays visible."""

from __future__ import annotations

import json
import math
from pathlib import Path

from trainer.contract import RunPaths, StepRecord
from trainer.metrics import Interval, MetricsWriter


def record(iteration: int, loss: float = 2.0, nan: int = 0) -> StepRecord:
    return StepRecord(iteration, 10, 16, 256, 0.5, 1e-3, 16, loss, 1.0, 32.0, 0.1, nan_iterations=nan)


def writer(folder: Path, tensorboard: bool = False) -> MetricsWriter:
    made = MetricsWriter(RunPaths(folder, "run", "main"), "7", True, tensorboard, 1, 1)
    made.open()
    return made


def test_a_metrics_file_that_cannot_be_written_is_said_once_and_tried_again(tmp_path, capsys):
    metrics = writer(tmp_path)
    metrics.paths.metrics.symlink_to("/dev/full")
    metrics.step(record(1), 1, 16)
    metrics.step(record(2), 1, 16)
    metrics.validation("valid", 2, 32, 512, 2.0)
    metrics.paths.metrics.unlink()
    metrics.step(record(3), 1, 16)
    shown = capsys.readouterr().out
    assert shown.count("metrics cannot be written") == 1
    assert shown.count(" lm loss: 2.0") == 3
    assert json.loads(metrics.paths.metrics.read_text())["iteration"] == 3


def test_a_tensorboard_that_fails_is_said_once(tmp_path, capsys):
    metrics = writer(tmp_path, tensorboard=True)
    metrics._events._get_file_writer().close()
    for iteration in (1, 2):
        metrics.step(record(iteration), 1, 16)
    metrics.validation("valid", 2, 32, 512, 2.0)
    metrics.close()
    assert capsys.readouterr().out.count("TensorBoard cannot be written") == 1
    assert len(metrics.paths.metrics.read_text().splitlines()) == 3


def test_a_nan_loss_is_counted_and_visible(tmp_path, capsys):
    interval = Interval()
    interval.add(math.nan, 0.5, 16, False)
    interval.add(2.0, 0.5, 16, True)
    assert (interval.nan, interval.skipped, interval.steps) == (1, 1, 2)
    metrics = writer(tmp_path)
    metrics.step(record(1, interval.loss / 2, interval.nan), 1, 16)
    shown = capsys.readouterr().out
    assert "lm loss: nan |" in shown
    assert "number of nan iterations:   1 |" in shown
    line = json.loads(metrics.paths.metrics.read_text())
    assert (line["lm_loss"], line["nan_iterations"]) == (None, 1)

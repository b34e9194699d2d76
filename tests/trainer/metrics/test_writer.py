"""Metrics on a disk that refuses them: said once, and the training goes on; NaN stays visible."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.trainer.schedule_cards import card
from trainer.contract.metrics_record import StepRecord
from trainer.metrics.writer import Interval, MetricsWriter
from trainer.schedule.path import Progress

TIMERS = {"optimizer": 0.25}


def record(iteration: int, loss: float = 2.0, nan: int = 0) -> StepRecord:
    return StepRecord(
        iteration, 10, 16, 256, 0.5, 1e-3, 16, loss, 1.0, 32.0, 0.1, nan_iterations=nan
    )


def writer(folder: Path, tensorboard: bool = False, **logging: Any) -> MetricsWriter:
    config = card(
        run={"name": "run", "directory": str(folder)},
        logging={"tensorboard": tensorboard, "tensorboard_queue": 1, **logging},
    )
    made = MetricsWriter(config, "7", is_writer=True, world_size=1, replicas=1)
    made.open()
    return made


def test_an_unwritable_metrics_file_is_said_once_and_retried(tmp_path, capsys):
    metrics = writer(tmp_path)
    metrics.paths.metrics.symlink_to("/dev/full")
    metrics.step(record(1), {}, TIMERS)
    metrics.step(record(2), {}, TIMERS)
    metrics.validation("valid", Progress(2, 32, 512), 2.0)
    metrics.paths.metrics.unlink()
    metrics.step(record(3), {}, TIMERS)
    shown = capsys.readouterr().out
    assert shown.count("metrics cannot be written") == 1
    assert shown.count(" lm loss: 2.0") == 3
    assert json.loads(metrics.paths.metrics.read_text())["iteration"] == 3


def test_a_tensorboard_that_fails_is_said_once(tmp_path, capsys):
    metrics = writer(tmp_path, tensorboard=True)
    metrics._events._get_file_writer().close()
    for iteration in (1, 2):
        metrics.step(record(iteration), {}, TIMERS)
    metrics.validation("valid", Progress(2, 32, 512), 2.0)
    metrics.close()
    assert capsys.readouterr().out.count("TensorBoard cannot be written") == 1
    assert len(metrics.paths.metrics.read_text().splitlines()) == 3


def test_each_part_of_a_loss_is_shown(tmp_path, capsys):
    interval = Interval()
    for lm in (4.0, 5.0):
        interval.add(lm + 0.5, 0.5, 16, 256, False, {"lm": lm, "sop": 0.5})
    assert interval.losses() == (4.5, (("sop", 0.5),))
    metrics = writer(tmp_path)
    metrics.step(replace(record(1, 4.5), other_losses=(("sop", 0.5),)), {}, TIMERS)
    found = {"lm": 4.0, "sop": 0.25, "lm accuracy": 0.5, "sop accuracy": 0.75}
    metrics.validation("valid", Progress(2, 32, 512), 4.25, parts=found)
    shown = capsys.readouterr().out
    assert " | lm loss: 4.500000E+00 | sop loss: 5.000000E-01 | grad norm" in shown
    assert (
        "| lm loss value: 4.000000E+00 | lm loss PPL: 5.459815E+01 | sop loss value: 2.500000E-01 |"
        in shown
    )
    assert "| lm accuracy: 0.5000 | sop accuracy: 0.7500 | \n" in shown
    step, validation = (json.loads(line) for line in metrics.paths.metrics.read_text().splitlines())
    assert (step["lm_loss"], step["sop_loss"]) == (4.5, 0.5) and "other_losses" not in step
    wanted = {"lm_loss": 4.0, "sop_loss": 0.25, "lm_accuracy": 0.5, "sop_accuracy": 0.75}
    assert {name: validation[name] for name in wanted} == wanted
    metrics.step(record(2), {}, TIMERS)
    plain = json.loads(metrics.paths.metrics.read_text().splitlines()[-1])
    assert [key for key in plain if key.endswith("loss")] == ["lm_loss"]


def test_a_nan_loss_is_counted_and_visible(tmp_path, capsys):
    interval = Interval()
    interval.add(math.nan, 0.5, 16, 256, False)
    interval.add(2.0, 0.5, 16, 128, True)
    assert (interval.nan, interval.skipped, interval.steps, interval.tokens) == (1, 1, 2, 384)
    metrics = writer(tmp_path)
    metrics.step(record(1, interval.loss / 2, interval.nan), {"mfu": 0.5}, TIMERS)
    shown = capsys.readouterr().out
    assert "lm loss: nan |" in shown
    assert "number of nan iterations:   1 |" in shown
    line = json.loads(metrics.paths.metrics.read_text())
    assert (line["lm_loss"], line["nan_iterations"]) == (None, 1)


def tags(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What the event file holds: tag -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_holds_the_originals_tags(tmp_path):
    metrics = writer(tmp_path, tensorboard=True, tensorboard_interval=2, tensorboard_timers=True)
    for iteration in (1, 2, 3, 4):
        metrics.step(record(iteration, loss=iteration), {}, TIMERS)
    metrics.validation("valid_fr", Progress(4, 64, 1024), 2.0)
    metrics.settings({"run": {"seed": 7}}, 0)
    metrics.close()
    found = tags(metrics.paths.tensorboard)
    assert found["lm-loss-training/lm loss"] == [(2, 2.0), (4, 4.0)]
    assert found["lm-loss-training/lm loss vs samples"] == [(16, 2.0), (16, 4.0)]
    assert found["iteration-time/world_size"] == [(2, 1.0), (4, 0.0)]  # the restart marker
    assert found["time/optimizer-time"] == [(2, 0.25), (4, 0.25)]
    assert found["lm-loss-validation/valid_fr/lm loss validation vs samples"] == [(64, 2.0)]
    assert found["lm-loss-validation/valid_fr/lm loss validation ppl"][0][1] == pytest.approx(
        math.e**2
    )
    assert "num-zeros/num-zeros" not in found
    assert "loss-scale/loss-scale" not in found


def test_switched_off_tags_are_not_written(tmp_path):
    metrics = writer(
        tmp_path, tensorboard=True, tensorboard_learning_rate=False, tensorboard_batch_size=False,
        tensorboard_validation_perplexity=False, zeros_in_gradient=True,
    )  # fmt: skip
    metrics.step(record(1), {}, TIMERS)
    metrics.validation("valid", Progress(1, 64, 1024), 2.0)
    metrics.close()
    found = tags(metrics.paths.tensorboard)
    assert "num-zeros/num-zeros" in found
    absent = (
        "learning-rate/learning-rate",
        "batch-size/batch-size",
        "lm-loss-validation/valid/lm loss validation ppl",
    )
    assert not set(absent) & set(found)
    assert not any(tag.startswith("time/") for tag in found)

"""The course of any trainer's numbers, as its log tells it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tr11ops.dialects.trainer_lines import LINES, WITHOUT_NUMBERS, healthy, log, torchtitan
from tr11ops.curves.compare import compare
from tr11ops.curves.curve import curve_of
from tr11ops.curves.judge import judge
from tr11ops.curves.steps import logged_steps

NUMBERED = sorted(LINES.keys() - WITHOUT_NUMBERS)


@pytest.mark.parametrize("name", NUMBERED)
def test_the_steps_of_each_trainer(tmp_path: Path, name: str) -> None:
    path, losses = tmp_path / "train.log", healthy(60)
    norms = [f"{1.1 + 0.003 * number:.4f}" for number in range(60)]
    path.write_text(log(LINES[name], losses, norms).rstrip("\n"))
    steps = list(logged_steps(path))
    assert [step.record.iteration for step in steps] == list(range(100, 160))
    assert [step.record.lm_loss for step in steps] == [
        pytest.approx(float(loss)) for loss in losses
    ]
    assert judge(steps).anomalies == ()
    curve = curve_of("run", steps, "iteration", "loss")
    assert (curve.x[0], curve.x[-1], curve.y[0]) == (100, 159, pytest.approx(4.2))


@pytest.mark.parametrize("name", NUMBERED)
def test_losses_that_are_none_are_missed(tmp_path: Path, name: str) -> None:
    path = tmp_path / "train.log"
    path.write_text(log(LINES[name], [*healthy(60), *["nan"] * 5]))
    assert "missing-loss" in {anomaly.kind for anomaly in judge(logged_steps(path)).anomalies}


def test_what_every_rank_prints_is_one_step(tmp_path: Path) -> None:
    path, text = tmp_path / "train.log", ""
    for step, loss in enumerate(healthy(40), start=1):
        text += "".join(
            torchtitan(step, 90, loss, "1.2", 100.0 + rank).replace("[rank0]", f"[rank{rank}]")
            for rank in range(8)
        )
    path.write_text(text)
    assert [step.record.iteration for step in logged_steps(path)] == list(range(1, 41))


def test_a_log_that_counts_no_samples_has_no_place_among_them(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(log(torchtitan, healthy(40)))
    curves = [curve_of(name, logged_steps(path), "samples", "loss") for name in ("a", "b")]
    with pytest.raises(ValueError, match="a: holds no finite value"):
        compare(curves)


def test_json_lines_are_a_log_and_no_metrics_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        "".join(
            json.dumps({"loss": 2.0 - 0.01 * step, "step": step}) + "\n" for step in range(1, 30)
        )
    )
    assert [step.record.iteration for step in logged_steps(path)] == list(range(1, 30))

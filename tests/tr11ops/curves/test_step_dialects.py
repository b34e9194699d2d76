"""The course of any trainer's numbers, as its log tells it: each is read as what it is."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
from msgspec import to_builtins

from tests.tr11ops.curves.logs import quiet
from tests.tr11ops.dialects.trainer_lines import LINES, WITHOUT_NUMBERS, healthy, log, torchtitan
from tr11ops.curves.compare import compare
from tr11ops.curves.curve import curve_of
from tr11ops.curves.judge import judge
from tr11ops.curves.steps import LoggedStep, logged_steps
from trainer.contract.metrics_record import format_step

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


START = "using world size: 384, data-parallel-size: 8, tensor-model-parallel size: 4, pipeline-model-parallel size: 12 "
ATTEMPT = "tr11: attempt 1001 launch 1 on jean-zay-iam[01-48]"


def lines(first: int, last: int, prefix: str = "") -> list[str]:
    return [f"{prefix}{format_step(step.record)}" for step in quiet(first, last)]


def read(path: Path, text: str | bytes) -> list[LoggedStep]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(logged_steps(path))


def test_our_log_with_two_starts(tmp_path: Path) -> None:
    text = "\n".join(
        [
            ATTEMPT,
            START,
            *lines(1, 30),
            "noise",
            ATTEMPT.replace("1001", "1002"),
            START,
            *lines(21, 60),
            "",
        ]
    )
    steps = read(tmp_path / "main_log.txt", text)
    judged = judge(steps)
    assert (judged.steps, judged.starts, judged.first, judged.last) == (70, 2, 1, 60)
    assert [anomaly.kind for anomaly in judged.anomalies] == ["restart"]
    assert steps[0].line == 3 and steps[30].line == 36


def test_a_launcher_prefix_and_broken_text(tmp_path: Path) -> None:
    text = (
        "\n".join(lines(1, 5, "[default7]:")).encode()
        + b"\n\xff\xfe iteration nothing |\n"
        + b"x" * 3_000_000
        + b"\n"
    )
    assert [step.record.iteration for step in read(tmp_path / "log", text)] == [1, 2, 3, 4, 5]


def test_what_two_outputs_hold_is_one_step(tmp_path: Path) -> None:
    text = "\n".join(line for line in lines(1, 5) for _ in range(2))
    assert len(read(tmp_path / "log", text)) == 5


def test_a_line_without_a_loss_has_none(tmp_path: Path) -> None:
    """The historical trainer left the field out when the loss was NaN."""
    [line] = lines(7, 7)
    head, _, rest = line.partition(" lm loss:")
    [step] = read(tmp_path / "log", f"{head}{rest.partition('|')[2]}\n")
    assert math.isnan(step.record.lm_loss)


@pytest.mark.parametrize("is_packed", [False, True])
def test_metrics_packed_or_not(tmp_path: Path, is_packed: bool) -> None:
    records = [
        {"kind": "step", "time": 1e9, "job_id": "7", **to_builtins(step.record)}
        for step in quiet(1, 20)
    ]
    text = "".join(
        f"{json.dumps(record)}\n" for record in [*records, {"kind": "validation", "iteration": 20}]
    )
    text += '{"iteration": 21, "cut'
    steps = read(tmp_path / "metrics.jsonl", gzip.compress(text.encode()) if is_packed else text)
    assert [step.record.iteration for step in steps] == list(range(1, 21))
    assert {step.start for step in steps} == {"7"}


def test_a_cut_gzip_file_is_an_error(tmp_path: Path) -> None:
    whole = gzip.compress("\n".join(lines(1, 200)).encode())
    with pytest.raises(ValueError, match=r"log\.gz: the compressed file is damaged"):
        read(tmp_path / "log.gz", whole[: len(whole) // 2])


def test_an_empty_file_holds_no_step(tmp_path: Path) -> None:
    assert read(tmp_path / "log", "") == []

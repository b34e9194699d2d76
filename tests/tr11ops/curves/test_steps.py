"""Logs of several trainers are read as what they are."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
from msgspec import to_builtins

from tests.tr11ops.curves.logs import quiet
from tr11ops.curves.judge import judge
from tr11ops.curves.steps import LoggedStep, logged_steps
from trainer.contract.metrics_record import format_step

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

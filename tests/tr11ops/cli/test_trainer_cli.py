"""`tr11 trainer`: what it shows and refuses. What it makes of trainings: tests/tr11ops/trainers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from tests.tr11ops.trainers.folders import LONG_AGO, age, lay
from tr11ops.cli.main import execute
from tr11ops.dialects.dialect import names

STEP = "[titan] root - INFO - step: {step:2}  loss:  4.2  grad_norm:  1.8  memory: 47GiB(59%)  tps: 7,812  tflops: 402.11  mfu: 41.02%\n"
SCRATCH = "[titan] root - INFO - No checkpoint was provided, this is a fresh start.\n"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = execute(["trainer", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_every_dialect_is_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0 and all(f"{name:<12} " in out for name in names())
    for name in names():
        code, out, _ = run(capsys, "show", name)
        assert code == 0 and "whole if" in out
    code, out, _ = run(capsys, "list", "--json")
    assert [one["name"] for one in json.loads(out)["dialects"]] == list(names())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check"], "give --log FILE, --folder DIR, or both"),
        (["check", "--folder", "."], "--dialect is missing: give one of deepspeed"),
        (["check", "--dialect", "nobody", "--folder", "."], "'nobody' is no dialect"),
        (["check", "--dialect", "ours.toml", "--folder", "."], "ours.toml: cannot be read"),
        (["check", "--dialect", "nemo", "--folder", "gone"], "--folder gone: is no folder"),
        (["check", "--log", "empty.log"], "does not tell which trainer wrote it"),
        (["set-aside", "--dialect", "nemo", "--folder", "gone", "--yes"], "--folder gone: is no folder"),
        (["show", "nobody"], "'nobody' is no dialect"),
    ],
)  # fmt: skip
def test_what_is_wrongly_typed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.log").touch()
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_a_log_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", "--log", "gone.log")
    assert (code, out) == (3, "") and "gone.log" in err and err.count("\n") == 1


def test_a_training_that_began_anew_though_it_need_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text(SCRATCH + STEP.format(step=7))
    root = tmp_path / "out"
    lay(root, {"step-500/.metadata": pickle.dumps("optimizer.w", 0).decode()})
    words = ("check", "--log", str(log), "--folder", str(root), "--dialect", "torchtitan")
    code, _, err = run(capsys, *words)
    assert code == 1
    assert "it began with random weights, though step-500 was there and is whole" in err
    saved = "[titan] root - INFO - Finished saving the checkpoint in 0.10 seconds.\n"
    for text in (
        STEP.format(step=700),
        STEP.format(step=7) + saved,
    ):  # it may have written that one itself
        log.write_text(SCRATCH + text)
        assert run(capsys, *words)[0] == 0
    log.write_text(SCRATCH + STEP.format(step=7))
    age(tmp_path, LONG_AGO - 10)  # and so may a later launch
    age(root)
    assert run(capsys, *words)[0] == 0


def test_a_dry_run_and_a_no_move_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = lay(tmp_path / "ckpt", {
        "20/model_config.json": "{}", "40/shard": "x", "latest.txt": "40",
    })  # fmt: skip
    words = ("set-aside", "--dialect", "nanotron", "--folder", str(root))
    code, _, err = run(capsys, *words, "--dry-run")
    assert code == 0 and "40: broken (no model_config.json in it)" in err
    code, _, err = run(capsys, *words)  # no terminal, and no --yes
    assert code == 2 and "--yes" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]
    code, out, _ = run(capsys, *words, "--yes", "--json")
    assert code == 0 and json.loads(out)["goes_back_to"] == "20"
    assert (root / "latest.txt").read_text() == "20"
    code, out, _ = run(capsys, *words, "--yes")
    assert code == 0 and "nothing to move: it takes 20, which is whole" in out

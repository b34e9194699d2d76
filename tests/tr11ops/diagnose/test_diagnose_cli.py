"""`tr11 diagnose` as it is typed: the screen, the document, the exit codes."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import pytest

from tests.tr11ops.diagnose.diagnose_logs import FAILED
from tr11ops.cli.main import execute


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(FAILED)
    return path


def test_the_screen_fits_and_says_what_to_do(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["diagnose", str(log)]) == 1
    lines = capsys.readouterr().out.replace(f"{log.parent}/", "").splitlines()
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert (
        "user_code: software or data, not the nodes" in text
        and "rank 2, node n2" in text
        and "KeyError: 'input_ids'" in text
    )


def test_the_document(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["diagnose", "--json", str(log)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert (document["verdict"], document["action"]) == ("user_code", "fix_config")
    root = document["root_cause"]
    assert (root["file"], root["line_number"], root["rank"], root["node"]) == (str(log), 9, 2, "n2")
    assert set(root) == {"file", "line_number", "text", "rank", "node", "gpu", "time"}
    assert (
        document["consequences"] and document["explanation"] and 0.7 < document["confidence"] < 0.9
    )


def test_parts_that_were_rotated_are_one_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = FAILED.splitlines(keepends=True)
    (tmp_path / "x.log.1.gz").write_bytes(gzip.compress("".join(lines[:6]).encode()))
    (tmp_path / "x.log").write_text("".join(lines[6:]))
    assert (
        execute(["diagnose", "--json", str(tmp_path / "x.log"), str(tmp_path / "x.log.1.gz")]) == 1
    )
    root = json.loads(capsys.readouterr().out)["root_cause"]
    assert (root["file"], root["line_number"]) == (str(tmp_path / "x.log"), 3)


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean, cut = tmp_path / "clean.log", tmp_path / "cut.gz"
    clean.write_text("[after training is done] datetime: 2022-03-21 13:34:11 \n")
    cut.write_bytes(gzip.compress(b"x" * 100_000)[:60])
    assert execute(["diagnose", str(clean)]) == 0
    assert execute(["diagnose", str(cut)]) == 3
    assert execute(["diagnose", str(tmp_path / "none")]) == 2
    assert execute(["diagnose", str(tmp_path)]) == 2
    assert execute(["diagnose", "--job", "7", str(clean)]) == 2
    said = capsys.readouterr().err
    assert (
        "the compressed file is damaged" in said
        and "does not exist" in said
        and "is a folder" in said
    )


@pytest.mark.parametrize(
    ("hours", "verdict", "restart"), [(0, "running", "none"), (5, "unknown", "unknown")]
)
def test_a_log_that_ends_on_a_step_is_told_by_how_long_ago_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hours: int, verdict: str, restart: str
) -> None:
    path = tmp_path / "train.log"
    path.write_text(
        "".join(
            f"2026-03-04 10:0{minute}:00 step {minute} loss 2.{9 - minute}\n" for minute in range(9)
        )
    )
    written = time.time() - 3600 * hours
    os.utime(path, (written, written))
    assert execute(["diagnose", "--json", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["restart"]["answer"]) == (verdict, restart)
    assert ("cannot be told from here" in document["explanation"]) == bool(hours)

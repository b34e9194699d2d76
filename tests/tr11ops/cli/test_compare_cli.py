"""`tr11 compare` and `tr11 numbers`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tr11ops.curves.logs import changed, quiet
from tr11ops.cli.main import execute
from trainer.contract.metrics_record import format_step


def log(path: Path, last: int = 300, loss: float = 2.2, **values: object) -> str:
    steps = (
        changed(quiet(1, last, loss=loss), 200, last, **values)
        if values
        else list(quiet(1, last, loss=loss))
    )
    path.write_text("".join(f"{format_step(step.record)}\n" for step in steps))
    return str(path)


def test_two_logs_as_text_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = [log(tmp_path / "main.txt"), log(tmp_path / "norm.txt", loss=2.1)]
    assert execute(["compare", *pair, "--by", "samples", "-o", str(tmp_path / "page.html")]) == 0
    screen = capsys.readouterr().out.splitlines()
    assert screen[0] == "loss by samples, means of 20 lines"
    assert screen[1:3] == ["  A  main.txt", "  B  norm.txt"]
    assert max(map(len, screen)) <= 80
    assert any(line.startswith("norm.txt is 0.1") and "below main.txt" in line for line in screen)
    page = (tmp_path / "page.html").read_text()
    assert "main.txt against norm.txt" in page and "<svg" in page and 'class="verdict' not in page
    assert execute(["compare", *pair, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["x"] for row in document["rows"]][-1] == 300
    assert document["rows"][-1]["differences"][0] == pytest.approx(-0.1, abs=0.03)


def test_a_window_of_the_courses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In iterations, samples or tokens, on whichever axis: what lies outside is in no row, mean or
    picture.
    """
    pair = [log(tmp_path / "main.txt"), log(tmp_path / "norm.txt", loss=2.1)]
    (batch,) = {step.record.global_batch_size for step in quiet(1, 3)}
    for words, first, last in (
        (["--from", "100", "--to", "150"], 100, 150),
        (["--from", f"{100 * batch}samples", "--to", f"{150 * batch / 1000} k samples"], 100, 150),
        (["--to", "150"], 1, 150),
    ):
        assert execute(["compare", *pair, *words, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        step = (last - first) / 10
        assert [row["x"] for row in document["rows"]] == pytest.approx(
            [first + step * (row + 1) for row in range(10)]
        )
    assert document["from"] is None and document["to"] == {"value": 150, "unit": "iterations"}
    words = ["--from", "100", "--to", "150", "--by", "samples", "-o", str(tmp_path / "page.html")]
    assert execute(["compare", *pair, *words]) == 0
    screen = capsys.readouterr().out.splitlines()
    assert screen[0] == "loss by samples, means of 20 lines from iteration 100 to iteration 150"
    assert (
        "loss by samples from iteration 100 to iteration 150"
        in (tmp_path / "page.html").read_text()
    )
    assert execute(["compare", *pair, "--from", "100", "--by", "hours", "--json"]) == 0
    hours = json.loads(capsys.readouterr().out)["rows"][0]["x"]
    assert execute(["compare", *pair, "--by", "hours", "--rows", "1", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["rows"][0]["x"]
    assert whole / 3 < hours < whole  # counted from the begin of the training


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--from", "soon"], 2, "--from: 'soon' is no place in a training; write it like 1200, 3Msamples or 50Btokens"),
        (["--to", "-5"], 2, "--to: '-5' is no place in a training"),
        (["--from", "3 Q tokens"], 2, "--from: '3 Q tokens' is no place"),
        (["--from", "20", "--to", "10"], 2, "--to: iteration 10 is before iteration 20; give a place behind --from"),
        (["--from", "900"], 3, "a.txt: holds no finite value from iteration 900"),
        (["--from", "1e99tokens"], 2, "is no place in a training"),
        (["--from", "9Ttokens", "--to", "30"], 3, "a.txt: holds no finite value from 9,000,000,000,000 tokens to iteration 30"),
    ],
)  # fmt: skip
def test_a_window_that_is_none_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], code: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    log(tmp_path / "a.txt", 20)
    log(tmp_path / "b.txt", 20)
    assert execute(["compare", "a.txt", "b.txt", *words]) == code
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["a.txt"], 2, "give 2 to 8 runs"),
        (["a.txt", "none/b.txt"], 2, "none/b.txt: does not exist"),
        (["a.txt", "empty.txt"], 3, "empty.txt: holds no line of a training step"),
        (["a.txt", "."], 2, "holds neither a tr11.toml nor the logs of a run"),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], code: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    log(tmp_path / "a.txt", 20)
    (tmp_path / "empty.txt").write_text("nothing\n")
    assert execute(["compare", *words]) == code
    assert said in capsys.readouterr().err


def test_numbers_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["numbers", log(tmp_path / "quiet.txt")]) == 0
    assert "Nothing looks wrong." in capsys.readouterr().out
    slow = log(tmp_path / "slow.txt", tflops=140.0)
    assert execute(["numbers", slow]) == 1
    screen = capsys.readouterr().out
    assert "1 thing to look at:" in screen and "! throughput falls from" in screen
    assert max(map(len, screen.splitlines())) <= 80
    assert execute(["numbers", slow, "--json"]) == 1
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert run["steps"] == 300 and run["anomalies"][0]["kind"] == "throughput-fall"


def test_numbers_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TR11_RUN", raising=False)
    assert execute(["numbers"]) == 2
    assert "tr11.toml" in capsys.readouterr().err

"""`tr11 goodput` and `tr11 advise` as they are typed: narrow, plain, as JSON, and on pasts that
cannot be read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.tr11ops.goodput.eventful import CARD, eventful
from tests.tr11ops.goodput.past import BEGIN, Past
from tests.tr11ops.replay.played_record import PlayedRecord
from tr11ops.base.errors import Refusal
from tr11ops.cli.goodput import adapting, moment_of
from tr11ops.cli.main import execute
from tr11ops.goodput.advise import CardSettings
from tr11ops.replay.parameters import Layout, Parameters
from tr11ops.replay.run import replay_card
from tr11ops.replay.traces import DAY, Fault, FaultSign, Window
from tr11ops.replay.world import World


@pytest.fixture
def past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Past:
    """An eventful past below the current folder, whose card is found there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "scheduler"))
    monkeypatch.setenv("TR11_LOCAL_NODES", "2")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.delenv("TR11_RUN", raising=False)
    monkeypatch.setattr("tr11ops.cli.goodput.time.time", lambda: BEGIN + 9600)
    Path("tr11.toml").write_text(CARD)
    made = Past(tmp_path)
    eventful(made)
    return made


def typed(capsys: pytest.CaptureFixture[str], *words: str, expect: int = 0) -> str:
    code = execute([*words, "--scheduler", "local"])
    told = capsys.readouterr()
    assert code == expect, told.err
    assert "Traceback" not in told.out + told.err
    return told.out if not expect else told.err


@pytest.mark.parametrize(
    "by", [(), ("--by", "attempt"), ("--by", "cause"), ("--by", "day"), ("--by", "week")]
)
def test_the_screen_fits_80_plain_columns(past, capsys, by):
    out = typed(capsys, "goodput", *by, "--price", "2.5")
    assert out.isascii() and max(map(len, out.splitlines())) <= 80
    rows = {line[:16].strip(): line for line in out.splitlines()}
    assert "#" in rows["useful"] and rows["total"].split()[1:] == [
        "10.67",
        "100.0",
        "%",
        "0.72",
        "13.17",
    ]
    if "attempt" in by:
        assert "launch 2" in rows and "1000_1" in rows
    if "cause" in by:
        assert list(rows).index("operator") < list(rows).index("stall")  # the dearest first


def test_json_adds_up_exactly(past, capsys):
    value = json.loads(typed(capsys, "goodput", "--json", "--price", "2"))
    assert (value["schema"], value["run"]) == (1, "run")
    total = value["total"]["node_microseconds"]
    assert (
        total
        == sum(bucket["node_microseconds"] for bucket in value["buckets"].values())
        == 4 * 9600 * 1_000_000
    )
    assert sum(sum(day["buckets"].values()) for day in value["days"]) == total
    held = sum(sum(attempt["buckets"].values()) for attempt in value["attempts"])
    assert held == value["total"]["held_microseconds"]
    assert value["total"]["cost"] == pytest.approx(held / 3.6e9 * 2)
    assert [launch["cause"] for launch in value["attempts"][0]["launches"]] == ["node", "operator"]
    assert value["faults"][0]["recovered"] - value["faults"][0]["time"] == 120
    assert value["mtbf_seconds"] > 0


def test_since_leaves_out_what_came_before(past, capsys):
    value = json.loads(typed(capsys, "goodput", "--json", "--since", "1h"))
    assert value["total"]["node_microseconds"] == 4 * 3600 * 1_000_000


def test_advise_says_what_to_type(past, capsys):
    out = typed(capsys, "advise")
    assert out.isascii() and max(map(len, out.splitlines())) <= 80
    assert (
        "2 faults are too little: 24 h or 5 faults are needed" in " ".join(out.split())
        and "type" not in out
    )
    value = json.loads(typed(capsys, "advise", "--json", "--mtbf", "1"))
    advice = {entry["topic"]: entry for entry in value["advice"]}
    assert value["schema"] == 1 and advice["save interval"]["better"] == "cannot tell"
    assert (
        advice["array"]["option"] is None and advice["exit margin"]["numbers"]["needed_seconds"] > 0
    )


def test_advise_replays_the_runs_own_record(tmp_path, monkeypatch, capsys):
    """A record that the controller has left, of five faults in five days."""
    layout, times = Layout(4, 4, 2), Parameters()
    nodes = tuple(f"n{number:03d}" for number in range(1, 9))
    faults = tuple(
        Fault(nodes[day], (day + 0.7) * DAY, (day + 0.8) * DAY, FaultSign.HARDWARE)
        for day in range(5)
    )
    played = PlayedRecord(tmp_path, Window(nodes, 5.5 * DAY, faults), layout, times)
    monkeypatch.setattr("tr11ops.cli.goodput.time.time", lambda: played.end)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("TR11_RUN", str(tmp_path / "replay.toml"))
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "scheduler"))
    monkeypatch.setattr("tr11ops.replay.advice.DRAWS", 1)
    with (played.directory.journal / "broken.jsonl").open("w") as stream:
        stream.write('{"time": 1\n[]\n')
    out = typed(capsys, "advise")
    assert out.isascii() and max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert "replayed: 5 faults in 5 d 12 h" in words and "when replayed" in words
    assert "spares 2 -> 1" in words and "type --set slurm.spare_nodes=1" in words
    value = json.loads(typed(capsys, "advise", "--json"))
    advice = {entry["topic"]: entry for entry in value["advice"]}
    assert abs(value["replay"]["difference"]) < 0.5 and value["replay"]["faults"] == 5
    assert advice["spares"]["worth_it"] and advice["spares"]["saved_node_hours"] > 100
    assert not advice["exclusion"]["worth_it"]
    attempt = next(iter(played.directory.attempt_ids()))
    (played.directory.paths.attempt(attempt) / "attempt.json").write_text("{")
    value = json.loads(typed(capsys, "advise", "--json"))
    assert value["replay"] is None and any(attempt in line for line in value["unknown"])
    assert {entry["better"] for entry in value["advice"]} >= {"cannot tell"}


def test_what_launches_choose_their_save_interval_by_is_replayed_too(tmp_path):
    world = World(Window(("n1", "n2"), DAY, ()), Layout(2, 0, 0), Parameters())
    settings = CardSettings(
        nodes=2, spares=0, task_seconds=1.0, time_limit=1.0, save_every=100, room=None,
        evaluates=False, remaining=None,
    )  # fmt: skip
    assert adapting(settings, replay_card(tmp_path, world)) == settings
    card = replay_card(tmp_path, world, ("resilience.adapt_save_interval=true",))
    assert adapting(settings, card) == settings  # no folder yet, of whose room anything is known
    card.paths.checkpoints.mkdir(parents=True)
    found = adapting(settings, card)
    assert found.adapts and found.free_checkpoints > 0 and found.written is None
    assert replay_card(tmp_path, world, found.resilience).slurm.gpus_per_node == 8


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("goodput", "--by", "node"), "must be one of attempt, cause, day, week"),
        (("goodput", "--since", "yesterday"), "is no time"),
        (("goodput", "--price", "-1"), "must be 0 or more"),
        (("advise", "--mtbf", "0"), "must be above 0"),
    ],
)
def test_wrong_words_are_refused_in_a_line(past, capsys, words, told):
    assert told in typed(capsys, *words, expect=2)


def test_a_past_that_cannot_be_read_is_unknown(past, capsys):
    attempts = past.paths.attempts
    for path in sorted(attempts.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    attempts.rmdir()
    attempts.write_text("a file where a folder belongs")
    assert "could not be read" in typed(capsys, "goodput", expect=3)
    assert "could not be read" in typed(capsys, "advise", expect=3)
    assert execute(["goodput", "--json", "--scheduler", "local"]) == 3
    told = capsys.readouterr()
    assert json.loads(told.out)["schema"] == 1, "one object, and no second one for the error"
    assert "could not be read" in told.err


def test_garbage_is_left_out_and_said(past, capsys):
    folder = past.paths.attempt("102")
    (folder / "launches" / "1.json").write_text('{"launch": 1, "nodes": 7}')
    (folder / "phases.jsonl").write_bytes(os.urandom(4096))
    (past.paths.attempt("103") / "verdict.json").write_text("[]")
    with past.paths.metrics.open("ab") as stream:
        stream.write(
            b"\xff\xfe\n" + b"[1]\n" + b'{"time": "x", "iteration": 1}\n' + b"{" * 5000 + b"\n"
        )
    out = typed(capsys, "goodput")
    assert "launch 1 of attempt 1000_2" in out


def test_nothing_was_launched(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TR11_RUN", raising=False)
    Path("tr11.toml").write_text(CARD)
    assert "nothing was launched from this card" in typed(capsys, "goodput", expect=3)


def test_a_moment_is_a_span_or_a_date():
    assert moment_of("7d", 1_000_000.0) == 1_000_000.0 - 7 * 86400
    assert moment_of("1.5h", 10_000.0) == 4600.0
    assert moment_of("2026-03-11T08:00", 0.0) - moment_of("2026-03-11", 0.0) == 8 * 3600
    for text in ("", "7", "d", "-7d", "2026-13-01", "9999999d"):
        with pytest.raises(Refusal):
            moment_of(text, 0.0)

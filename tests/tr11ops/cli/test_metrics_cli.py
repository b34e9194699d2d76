"""`tr11 metrics` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

from tests.plugins.command_server import tr11_command
from tests.tr11ops.cli.status_place import Place

RUN = ("--run", "demo", "--scheduler", "local")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.directory.root.mkdir()
    return made


def test_it_prints_what_status_sees_and_returns_its_code(place: Place) -> None:
    done = place.typed([*tr11_command(), "metrics", "--openmetrics", *RUN])
    assert (done.returncode, done.stderr) == (1, "")
    families = {family.name: family for family in open_metrics(done.stdout)}
    words = {sample.labels["word"]: sample.value for sample in families["tr11_verdict"].samples}
    assert words["down"] == 1
    plain = place.typed([*tr11_command(), "metrics", *RUN])
    assert 'tr11_verdict{run="demo",variant="main",word="down"} 1.0' in plain.stdout


def test_board_and_rules_need_no_card(place: Place) -> None:
    board = place.typed([*tr11_command(), "metrics", "--dashboard"])
    assert (board.returncode, board.stderr) == (0, "")
    assert json.loads(board.stdout)["uid"] == "tr11-run"
    rules = place.typed([*tr11_command(), "metrics", "--rules"])
    assert (rules.returncode, rules.stderr) == (0, "")
    assert yaml.safe_load(rules.stdout)["groups"][0]["name"] == "tr11"


def test_two_answers_at_once_are_refused(place: Place) -> None:
    done = place.typed([*tr11_command(), "metrics", "--dashboard", "--rules"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "tr11: --openmetrics, --dashboard and --rules are three answers: give one\n"
    )

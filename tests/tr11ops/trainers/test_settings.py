"""The card's `[trainer]` section: what it takes from its dialect, what it says otherwise, and what
the node's agent starts because of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tr11ops.base.errors import WrongUsage
from tr11ops.dialects.dialect import dialect_named
from tr11ops.dialects.settings import TrainerSettings, settings_of
from tr11ops.trainers.trainer import KEEPER, STAND_IN, NodePlaces, OwnTrainer, trainer_of


def test_what_the_section_leaves_out_is_the_dialects() -> None:
    found = settings_of(
        {"dialect": "huggingface", "command": ["train.py"], "folder": "/r/out"}, "c"
    )
    assert found.dialect == dialect_named("huggingface")
    assert found.resume == ("--resume_from_checkpoint", "{path}")
    assert found.checkpoint_folder == Path("/r/out")


def test_what_the_section_says_counts() -> None:
    table = {
        "dialect": "megatron",
        "command": ["pretrain.py"],
        "resume": [],
        "checkpoints": {"quiet": 2.0},
        "ends": {"exit": {"93": "hold"}},
        "progress": {"offset": 1},
        "marks": {"saved": "done: (?P<step>[0-9]+)"},
    }
    known, found = dialect_named("megatron"), settings_of(table, "c")
    assert found.resume == ()
    assert found.dialect.checkpoints is not None and known.checkpoints is not None
    assert found.dialect.checkpoints.quiet == 2.0
    assert found.dialect.checkpoints.name == known.checkpoints.name
    assert found.dialect.ends.exit == {**known.ends.exit, "93": "hold"}
    assert found.dialect.ends.lines == known.ends.lines
    assert found.dialect.offset == 1
    assert found.dialect.marks["saved"] != known.marks["saved"]
    assert found.dialect.marks["loading"] == known.marks["loading"]


def test_without_a_dialect_nothing_is_known() -> None:
    found = settings_of({"command": "python train.py --x 'a b'"}, "c")
    assert found.dialect.checkpoints is None and found.dialect.stop is None
    assert found.checkpoint_folder is None
    assert found.words[:2] == ("python", "train.py")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"command": 3}, "command"),
        ({}, "command"),
        ({"command": [], "start": "mpirun"}, "mpirun"),
        ({"command": [], "dialect": "hf"}, "'hf' is no dialect"),
        ({"command": [], "dialect": "huggingface", "stop": {"how": "ask"}}, "stop.how"),
        ({"command": [], "checkpoints": {"nane": "x"}}, "checkpoints.nane"),
        ({"command": [], "marks": {"saved": "("}}, "is no pattern"),
    ],
)
def test_a_wrong_section_is_one_line(table: dict[str, object], said: str) -> None:
    with pytest.raises(WrongUsage) as fault:
        settings_of(table, "tr11.toml")
    assert said in str(fault.value) and "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("card", "trainer"),
    [
        ({"trainer": {"command": ["x.py"]}}, KEEPER),
        ({"rehearsal": {"step_seconds": 1}}, STAND_IN),
        ({"trainer": None, "rehearsal": None}, OwnTrainer()),
        ({}, OwnTrainer()),
        ([], OwnTrainer()),
    ],
)
def test_the_card_says_what_the_node_starts(tmp_path: Path, card: object, trainer: object) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(card), encoding="utf-8")
    assert trainer_of(path) == trainer
    places = NodePlaces(2, 1, 4, address="n1", port=99)
    words = trainer_of(path).command(path, tmp_path, places)
    assert words[0] == sys.executable and words[-1] == str(path)
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=4", "--master-port=99"} <= set(words)


def test_a_card_without_the_section_has_no_settings(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(WrongUsage, match="no \\[trainer\\] section"):
        TrainerSettings.read(path)

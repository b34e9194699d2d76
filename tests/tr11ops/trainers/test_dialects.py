"""The shipped dialects: each says what its own examples say; a file of one's own is read strictly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tr11ops.trainers.folders import LATER, lay
from tr11ops.base.errors import WrongUsage
from tr11ops.dialects.dialect import (
    CheckpointName,
    Dialect,
    Example,
    dialect_named,
    dialect_of,
    names,
)
from tr11ops.trainers.checkpoints import survey
from tr11ops.trainers.log import TrainerLogReader

EXAMPLES = [(name, example) for name in names() for example in dialect_named(name).examples]
LINES = [(name, one) for name, one in EXAMPLES if one.line]
FOLDERS = [(name, one) for name, one in EXAMPLES if one.files]
PREFIXES = ("", "[rank0]: ", "\x1b[36m(worker)\x1b[0m ", " 3: ", "2026-10-01T10:00:00Z ")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("name", "example"), LINES)
def test_a_line_is_the_mark_or_the_end_that_its_dialect_says(
    name: str, example: Example, prefix: str
) -> None:
    if example.line.startswith("step ") and prefix:
        pytest.skip("a script that prints without a logger has no launcher's prefix")
    found = TrainerLogReader(dialect_named(name)).read([[(prefix + example.line).encode()]])
    assert set(found.marks) == ({example.mark} if example.mark else set())
    assert found.ending == example.end
    if example.step is not None:
        assert found.last == example.step + dialect_named(name).offset


@pytest.mark.parametrize(("name", "example"), FOLDERS)
def test_a_checkpoint_is_what_its_dialect_says(name: str, example: Example, tmp_path: Path) -> None:
    rules = dialect_named(name).checkpoints
    assert rules is not None
    lay(tmp_path, example.files)
    found = survey(rules, tmp_path, example.world_size, LATER)
    states = {one.name: (one.state, one.why) for one in found.found}
    assert states[example.name][0] == example.state, states


@pytest.mark.parametrize("name", names())
def test_every_mark_end_and_format_of_checkpoints_has_an_example(name: str) -> None:
    dialect = dialect_named(name)
    shown = {one.mark for one in dialect.examples} | {one.end for one in dialect.examples}
    assert set(dialect.marks) <= shown
    assert not dialect.step_line or any(one.step is not None for one in dialect.examples)
    assert {one.means for one in dialect.ends.lines} <= shown
    states = {one.state for one in dialect.examples if one.files}
    assert dialect.checkpoints is None or {"whole", "broken"} <= states
    assert dialect.source.startswith("https://")


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("step-{step}", "step-16", 16),
        ("step-{step}", "step-16.bad", None),
        ("iter_{step:07d}", "iter_0012000", 12000),
        ("iter_{step:07d}", "iter_12000000", 12000000),
        ("iter_{step:07d}", "iter_12", None),
        ("*step={step}*.ckpt", "epoch=0-step=500.ckpt", 500),
        ("*step={step}*.ckpt", "last.ckpt", None),
        ("{step}", "20", 20),
        ("{step}", "20.partial", None),
        ("ck_{step:012d}.pt", "ck_000000000012.pt", 12),
    ],
)
def test_names_and_their_steps(pattern: str, name: str, step: int | None) -> None:
    assert CheckpointName(pattern).step_of(name) == step
    assert CheckpointName(pattern).fits(name) == (step is not None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"title": "x"}, "`name`"),
        ({"name": "x", "title": "x", "mark": {}}, "`mark` is no key of a dialect"),
        ({"name": "x", "title": "x", "marks": {"loaded": "x"}}, "loaded"),
        ({"name": "x", "title": "x", "marks": {"saved": "("}}, "'(' is no pattern"),
        ({"name": "x", "title": "x", "steps": "nobody"}, "`steps`: 'nobody' is none of"),
        (
            {"name": "x", "title": "x", "checkpoints": {"name": "s", "complete": ["run evil"]}},
            "'run evil' is no rule",
        ),
        (
            {"name": "x", "title": "x", "checkpoints": {"name": "s", "complete": ["count a b"]}},
            "a rule of `count` is written otherwise",
        ),
        (
            {"name": "x", "title": "x", "checkpoints": {"name": "s", "complete": [], "newest": "last"}},
            "`checkpoints.newest`: 'last' is none of",
        ),
        ({"name": "x", "title": "x", "step_line": "loss"}, "`step_line` has no group"),
        ({"name": "x", "title": "x", "stop": {"how": "dance"}}, "`stop.how`: 'dance' is none of"),
        ({"name": "x", "title": "x", "ends": {"exit": {"abc": "hold"}}}, "'abc' is no exit code"),
        (
            {"name": "x", "title": "x", "checkpoints": {"name": "{step}-{step}", "complete": []}},
            "may hold {step} or {step:06d}, once",
        ),
        (
            {"name": "x", "title": "x", "checkpoints": {"name": "s", "complete": ["has {name:05d}"]}},
            "{name:05d} is none of",
        ),
        (
            {"name": "x", "title": "x", "checkpoints": {"name": "s", "complete": [], "wholly": 1}},
            "`checkpoints.wholly` is no key",
        ),
    ],
)  # fmt: skip
def test_a_wrong_dialect_is_refused_in_one_line(content: dict[str, object], said: str) -> None:
    with pytest.raises(WrongUsage, match=re.escape(said)) as fault:
        dialect_of(content, "ours.toml")
    assert str(fault.value).startswith("ours.toml: ")
    assert "\n" not in str(fault.value)


def test_a_dialect_of_ones_own_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('name = "ours"\ntitle = "Ours"\n[marks]\nsaved = "written"\n', encoding="utf-8")
    found = dialect_named(str(path))
    assert found == Dialect("ours", "Ours", marks={"saved": "written"})


def test_a_line_of_ones_own_and_a_number_that_is_none() -> None:
    content = {
        "name": "ours",
        "title": "Ours",
        "step_line": r"\[e\d+ i(?P<step>\d+)\] l=(?P<loss>\S+)",
        "marks": {"resumed": r"from (?P<done>\S+)"},
    }
    reader = TrainerLogReader(dialect_of(content, "ours.toml"))
    lines = [
        b"from ck_00015",
        b"[e0 i00012] l=2.31 (0.4s)",
        b"[e0 i00013] l=bad",
        b"[e0 i" + b"1" * 5000,
    ]
    found = reader.read([lines])
    assert (found.first, found.last, found.loss, found.resumed_at) == (12, 13, 2.31, None)
    assert found.words == ("ours",)


@pytest.mark.parametrize("text", ["name = ", "\xff", None])
def test_a_file_that_is_no_dialect(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "ours.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(WrongUsage, match=re.escape(str(path))):
        dialect_named(str(path))
    with pytest.raises(WrongUsage, match="no dialect: give one of deepspeed"):
        dialect_named("nobody")

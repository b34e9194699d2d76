"""Which packages only tr11's own trainer needs, and what is said where they are missing."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tr11ops.base import installed
from tr11ops.base.errors import Refusal

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = {
    *installed.TRAINING,
    *installed.READING_CHECKPOINTS,
    *installed.MAKING_DATA,
    *installed.MEASURING_NODES,
}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9.-]", one)[0].lower() for one in requirements}


def test_what_is_needed_is_in_the_extra_and_nowhere_else() -> None:
    base, extras = names_of(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    trainer = names_of(extras["trainer"])
    assert trainer >= NEEDED and not trainer & base
    assert "tr11[trainer]" in extras["test"] and "tr11[trainer]" in extras["gpu"]


def test_the_operation_imports_nothing_of_the_extra() -> None:
    """Not in a function either: a base install would find out at night."""
    modules = names_of(PROJECT["optional-dependencies"]["trainer"])
    found = []
    trackers = ROOT / "tr11ops" / "trackers"  # each with an extra of its own
    for path in (ROOT / "tr11ops").rglob("*.py"):
        if path.parent == trackers:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found += [
                f"{path}: {name}" for name in names if name.partition(".")[0].lower() in modules
            ]
    assert found == []


def test_what_is_there_is_not_missing() -> None:
    assert installed.missing(("pytest", "no_such_package_ever")) == ("no_such_package_ever",)
    installed.require(("pytest",), "this")
    assert re.match(r"torch \d\S+, deepspeed \d\S+, numpy ", installed.trainer_line())


def test_a_refusal_says_what_to_type() -> None:
    with pytest.raises(Refusal) as raised:
        installed.require(("pytest", "no_such_a", "no_such_b"), "tr11 eval")
    assert raised.value.exit_code == 1
    assert str(raised.value) == (
        'tr11 eval needs no_such_a, no_such_b, not installed here; type: pip install "tr11[trainer]"'
    )

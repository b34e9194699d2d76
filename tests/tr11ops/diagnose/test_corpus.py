"""The labelled logs of broken trainings: class, root cause, and no certainty where it is wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.diagnose.diagnose_logs import diagnosed
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.lines import plain
from tr11ops.diagnose.reading import blocks

FOLDER = Path(__file__).parents[2] / "data" / "diagnose"
LABELS: dict[str, dict[str, Any]] = {
    name: label
    for file in ("labels.toml", "words.toml")
    for name, label in tomllib.loads((FOLDER / file).read_text(encoding="utf-8")).items()
}
CERTAIN = 0.9


@pytest.fixture(scope="module")
def found() -> dict[str, Diagnosis]:
    return {
        name: diagnosed([FOLDER / file for file in label["files"]])[0]
        for name, label in LABELS.items()
    }


def has_class(name: str, diagnosis: Diagnosis) -> bool:
    label = LABELS[name]
    return diagnosis.fault.value in {label["verdict"], *label.get("accepted_verdicts", ())}


def has_line(name: str, diagnosis: Diagnosis) -> bool:
    label, root = LABELS[name], diagnosis.root_cause
    cause = label["root_cause"]
    lines = {(cause["file"], cause["line_number"])}
    lines |= {
        (file, line)
        for file, numbers in label.get("accepted_lines", {}).items()
        for line in numbers
    }
    return root is not None and (Path(root.file).name, root.line_number) in lines


def share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def test_classes_actions_and_root_causes(found: dict[str, Diagnosis]) -> None:
    assert len(found) >= 200
    steps = [
        one.step.value in {LABELS[name]["action"], *LABELS[name].get("accepted_actions", ())}
        for name, one in found.items()
    ]
    assert share([has_class(name, one) for name, one in found.items()]) >= 0.95
    assert (
        share([has_line(name, one) for name, one in found.items() if "root_cause" in LABELS[name]])
        >= 0.90
    )
    assert share(steps) >= 0.95


def test_nothing_wrong_is_said_with_certainty(found: dict[str, Diagnosis]) -> None:
    assert [
        name for name, one in found.items() if one.confidence > CERTAIN and not has_class(name, one)
    ] == []


def test_nodes_and_ranks_are_named(found: dict[str, Diagnosis]) -> None:
    def named(key: str) -> list[bool]:
        return [
            getattr(one.root_cause, key, None) == LABELS[name][key]
            for name, one in found.items()
            if key in LABELS[name]
        ]

    assert share(named("node")) >= 0.9 and share(named("rank")) >= 0.9


def test_every_quoted_line_is_in_its_file(found: dict[str, Diagnosis]) -> None:
    for name, one in found.items():
        root = one.root_cause
        if root is not None and not root.text.startswith("the worker "):
            lines = b"".join(blocks(Path(root.file))).split(b"\n")
            line = plain(lines[root.line_number - 1].decode("utf-8", "replace"))
            assert root.text[-20:].strip() in line, name

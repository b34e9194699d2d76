"""How the history is played, without a twin: what it waits for, and which attempt it asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.twin.chronicle import Chronicler
from tests.twin.rehearsal_inputs import attempts_of
from trainer.contract.paths import ATTEMPT_FILE, RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run", "tr11", "main")


def test_what_needs_a_checkpoint_waits_for_the_first_save(paths: RunPaths) -> None:
    """A roll-back was typed before it, and named no step."""
    waited_for: list[str] = []

    def until(condition: Callable[[], object], what: str) -> None:
        assert not condition()
        paths.checkpoints.mkdir(parents=True)
        (paths.checkpoints / "latest").write_text("global_step5")
        assert condition()
        waited_for.append(what)

    chronicler: Any = SimpleNamespace(run=SimpleNamespace(paths=paths), until=until)
    assert (Chronicler._newest_step(chronicler), waited_for) == (5, ["the first save"])


def test_the_last_task_of_an_array_is_the_newest_attempt_though_its_number_is_the_lowest(
    paths: RunPaths,
) -> None:
    """Where it asked for a person, the history went on waiting: the verdict of another was read."""
    for name, start in (("8", 1.0), ("9", 2.0), ("7", 3.0)):
        paths.attempt(name).mkdir(parents=True)
        (paths.attempt(name) / ATTEMPT_FILE).write_text(json.dumps({"start": start}))
    paths.attempt("10").mkdir()
    assert attempts_of(paths) == ["8", "9", "7", "10"]

"""Runs on a twin: those that the faults of the runbooks befall, and a small one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from tests.twin.runbook_scene import SCENARIOS, Scenario, Scene
from tests.twin.small_run import SmallRun, enter, on_stage
from tr11ops.twin.twin import Twin

for kind in ("own_runs", "shared_run"):  # each registers its scenarios
    pytest.register_assert_rewrite(f"tests.twin.runbook_{kind}")
    importlib.import_module(f"tests.twin.runbook_{kind}")
# A run of its own has the shared one's name, and is refused beside it: the shared one lives on, so
# that it comes last.
SCENARIOS.sort(key=attrgetter("is_alone"), reverse=True)


@pytest.fixture(scope="module")
def shared(twin: Twin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The run that most faults of a file befall, one after another."""
    scene = Scene(twin, tmp_path_factory.mktemp("run"))
    yield scene
    scene.stop()


@pytest.fixture
def scene(request: pytest.FixtureRequest, twin: Twin, tmp_path: Path) -> Iterator[Scene]:
    """The run of one scenario, which is well again after it; one of its own is ended."""
    asked: Scenario = request.param
    made = (
        Scene(twin, tmp_path, asked.changes)
        if asked.is_alone
        else request.getfixturevalue("shared")
    )
    made.write_card(*asked.changes)
    made.by_mail = False
    yield made
    made.heal()
    if asked.is_alone:
        made.stop()


@pytest.fixture
def stage(small_twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallRun]:
    """A small run on the `small_twin` of the file."""
    enter(small_twin, tmp_path, monkeypatch)
    with on_stage(SmallRun(tmp_path, small_twin)) as run:
        yield run

"""Every alert's page in runbooks/: its commands, typed as they stand there, cure the fault that they treat."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.twin.runbook_scenarios import SCENARIOS, Scenario
from tests.twin.runbook_scene import Scene
from tr11ops.detect.registry import DETECTORS
from tr11ops.twin.twin import Twin

for kind in ("own_runs", "queue", "copies", "nodes"):  # each registers its scenarios
    pytest.register_assert_rewrite(f"tests.twin.runbook_{kind}")
    importlib.import_module(f"tests.twin.runbook_{kind}")


@pytest.fixture(scope="module")
def shared(twin: Twin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The run that most faults befall, one after another."""
    scene = Scene(twin, tmp_path_factory.mktemp("run"))
    yield scene
    scene.stop()


@pytest.fixture
def scene(request: pytest.FixtureRequest, twin: Twin, tmp_path: Path) -> Iterator[Scene]:
    """The run of one scenario, which is well again after it; one of its own is ended."""
    asked: Scenario = request.param
    made = Scene(twin, tmp_path, asked.changes) if asked.is_alone else request.getfixturevalue("shared")
    made.write_card(*asked.changes)
    made.by_mail = False
    yield made
    made.heal()
    if asked.is_alone:
        made.stop()


@pytest.mark.parametrize("scene", SCENARIOS, ids=lambda asked: "+".join(asked.detectors), indirect=True)
def test_the_page_cures_its_fault(scene: Scene, request: pytest.FixtureRequest) -> None:
    request.node.callspec.params["scene"].play(scene)


@pytest.mark.parametrize("scene", SCENARIOS, ids=lambda asked: "+".join(asked.detectors), indirect=True)
def test_the_mail_cures_its_fault(scene: Scene, request: pytest.FixtureRequest) -> None:
    scene.by_mail = True
    request.node.callspec.params["scene"].play(scene)


def test_every_detector_has_its_fault() -> None:
    names = [name for asked in SCENARIOS for name in asked.detectors]
    assert sorted(names) == sorted(detector.NAME for detector in DETECTORS)

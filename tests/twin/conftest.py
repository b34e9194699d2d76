"""Runs on a twin: those that the faults of the runbooks befall, and a small one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import is_older_slurm
from tests.twin.runbook_scene import Scenario, Scene
from tests.twin.small_run import SmallRun, enter, on_stage
from tr11ops.twin.twin import Twin

EXPEDITES = (25, 11)  # the first Slurm that does


collect_ignore = ["test_expedited_twin.py"] if is_older_slurm(EXPEDITES) else []

for kind in ("own_runs", "shared_run"):  # each registers its scenarios
    pytest.register_assert_rewrite(f"tests.twin.runbook_{kind}")
    importlib.import_module(f"tests.twin.runbook_{kind}")


@pytest.fixture(scope="module")
def shared(twin: Twin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The run that most faults of a file befall, one after another."""
    scene = Scene(twin, tmp_path_factory.mktemp("run"))
    yield scene
    scene.stop()


@pytest.fixture
def play(
    request: pytest.FixtureRequest, twin: Twin, tmp_path: Path
) -> Callable[[Scenario, bool], set[str]]:
    """Plays a scenario, with what its mail says or with what its page does, in its run, which is
    well again after it; one of its own is ended. Returns the detectors whose pages were typed.
    """

    def played(asked: Scenario, by_mail: bool) -> set[str]:
        if asked.is_alone:
            folder = tmp_path / ("mail" if by_mail else "page")
            folder.mkdir()
            scene = Scene(twin, folder, asked.changes)
        else:
            scene = request.getfixturevalue("shared")
        scene.write_card(*asked.changes)
        scene.by_mail = by_mail
        scene.pages.clear()
        try:
            asked.play(scene)
        finally:
            scene.heal()
            if asked.is_alone:
                scene.stop()
        return scene.pages

    return played


@pytest.fixture
def stage(small_twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallRun]:
    """A small run on the `small_twin` of the file."""
    enter(small_twin, tmp_path, monkeypatch)
    with on_stage(SmallRun(tmp_path, small_twin)) as run:
        yield run

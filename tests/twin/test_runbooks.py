"""Every alert's page in runbooks/: its commands, typed as they stand there, cure the fault that
they treat.
"""

from __future__ import annotations

import pytest

from tests.twin.runbook_scene import SCENARIOS, Scene
from tr11ops.detect.registry import DETECTORS


@pytest.mark.parametrize(
    "scene", SCENARIOS, ids=lambda asked: "+".join(asked.detectors), indirect=True
)
def test_the_page_cures_its_fault(scene: Scene, request: pytest.FixtureRequest) -> None:
    request.node.callspec.params["scene"].play(scene)


def test_every_detector_has_its_fault() -> None:
    """One at least: a hang has one where all ranks stand still, and one where a single rank is
    stopped.
    """
    names = {name for asked in SCENARIOS for name in asked.detectors}
    assert names == {detector.name for detector in DETECTORS}

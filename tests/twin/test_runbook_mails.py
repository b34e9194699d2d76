"""Every alert's mail: the commands that it says to type, typed as they stand there, cure the fault
that it tells of.
"""

from __future__ import annotations

import pytest

from tests.twin.runbook_scene import MAIL_SCENARIOS, SCENARIOS, Scenario, Scene


def named(asked: Scenario) -> str:
    return asked.play.__name__ if asked in MAIL_SCENARIOS else "+".join(asked.detectors)


@pytest.mark.parametrize("scene", [*MAIL_SCENARIOS, *SCENARIOS], ids=named, indirect=True)
def test_the_mail_cures_its_fault(scene: Scene, request: pytest.FixtureRequest) -> None:
    scene.by_mail = True
    request.node.callspec.params["scene"].play(scene)

"""Every alert's mail, and its page in runbooks/: the commands that each says to type, typed as they
stand there, cure the fault that it tells of.

A fault is played with what its mail says. It is played again with its page where that was not typed
by then: it is where the mail can only say where to look, and where both say the same.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.twin.runbook_scene import SCENARIOS, Scenario
from tr11ops.detect.registry import DETECTORS

SHARED = [asked for asked in SCENARIOS if not asked.is_alone]


@pytest.mark.parametrize("asked", SHARED, ids=["+".join(asked.detectors) for asked in SHARED])
def test_mail_and_page_cure_their_fault(
    asked: Scenario, play: Callable[[Scenario, bool], set[str]]
) -> None:
    if not play(asked, True) >= set(asked.detectors):
        play(asked, False)


def test_every_detector_has_its_fault() -> None:
    """One at least: a hang has one where all ranks stand still, and one where a single rank is
    stopped.
    """
    names = {name for asked in SCENARIOS for name in asked.detectors}
    assert names == {detector.name for detector in DETECTORS}

"""As in `test_runbooks.py`, of the faults that befall a run of their own; and those whose page says
more than the one cure that their mail has.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.twin.runbook_scene import MAIL_SCENARIOS, SCENARIOS, Scenario

ALONE = [asked for asked in SCENARIOS if asked.is_alone]


@pytest.mark.parametrize("asked", ALONE, ids=["+".join(asked.detectors) for asked in ALONE])
def test_mail_and_page_cure_their_fault(
    asked: Scenario, play: Callable[[Scenario, bool], set[str]]
) -> None:
    if not play(asked, True) >= set(asked.detectors):
        play(asked, False)


@pytest.mark.parametrize("asked", MAIL_SCENARIOS, ids=lambda asked: asked.play.__name__)
def test_the_mail_cures_its_fault(
    asked: Scenario, play: Callable[[Scenario, bool], set[str]]
) -> None:
    play(asked, True)

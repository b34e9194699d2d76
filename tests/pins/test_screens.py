"""Golden screens: what commands show of the recorded run in each state, and the mails that it leads
to.

`pytest tests/pins --accept` writes them; `git diff tests/data/screens` then shows what a change
does to the screens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pins.conftest import PlaceOf
from tests.pins.screens import SCREENS, Screen, mails, taken
from tests.pins.states import place_in
from tests.plugins.golden_fixture import Golden

FOLDER = Path(__file__).parents[1] / "data" / "screens"
MAILED = ("stalled", "down", "held", "damaged")


@pytest.mark.parametrize("screen", SCREENS, ids=[screen.name for screen in SCREENS])
def test_screen(screen: Screen, place_of: PlaceOf, golden: Golden) -> None:
    with place_of(screen) as place:
        golden(FOLDER / f"{screen.name}.txt", taken(place, screen.words, screen.columns))


@pytest.mark.parametrize("state", MAILED)
def test_mails(state: str, golden: Golden) -> None:
    with place_in(state) as place:
        golden(FOLDER / f"mails-{state}.txt", mails(place))


def test_every_file_is_of_a_screen() -> None:
    known = {f"{screen.name}.txt" for screen in SCREENS} | {
        f"mails-{state}.txt" for state in MAILED
    }
    assert len(known) == len(SCREENS) + len(MAILED), "two screens of one name"
    assert {path.name for path in FOLDER.iterdir()} == known

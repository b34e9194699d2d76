"""Golden values: what the documents of commands say of the recorded run. `pytest tests/pins
--accept` writes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pins.conftest import PlaceOf
from tests.pins.screens import Screen, taken
from tests.pins.values import VALUES, documents, missed

FOLDER = Path(__file__).parents[1] / "data" / "values"


@pytest.mark.parametrize("screen", VALUES, ids=[screen.name for screen in VALUES])
def test_values(screen: Screen, place_of: PlaceOf, accepts: bool) -> None:
    with place_of(screen) as place:
        now = documents(taken(place, screen.words))
    path = FOLDER / f"{screen.name}.json"
    if accepts:
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            json.dumps(now, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    pinned = json.loads(path.read_text(encoding="utf-8"))
    assert len(pinned) == len(now)
    assert list(missed(pinned, now)) == []


def test_every_file_is_of_a_document() -> None:
    known = {f"{screen.name}.json" for screen in VALUES}
    assert len(known) == len(VALUES), "two documents of one name"
    assert {path.name for path in FOLDER.iterdir()} == known


@pytest.mark.parametrize(
    ("pinned", "now", "said"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, []),
        ({"a": {"b": 1.0}}, {"a": {}}, [".a.b is gone"]),
        ([1, 2], [1], [" is [1], was [1, 2]"]),
        ({"a": 1}, {"a": True}, [".a is True, was 1"]),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, []),
        ({"a": None}, {"a": 0}, [".a is 0, was None"]),
    ],
)
def test_what_a_reader_would_miss(pinned: Any, now: Any, said: list[str]) -> None:
    assert list(missed(pinned, now)) == said

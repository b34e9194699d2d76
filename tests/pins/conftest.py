"""The recorded run in a state, for golden screens and values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.pins.screens import Screen
from tests.pins.states import Place, place_in

PlaceOf = Callable[[Screen], AbstractContextManager[Place]]


@pytest.fixture(scope="session")
def place_of() -> Iterator[PlaceOf]:
    """Where a screen is taken: commands that only look share a place for each state."""
    places: dict[str, Place] = {}
    with contextlib.ExitStack() as stack:

        def find(screen: Screen) -> AbstractContextManager[Place]:
            if screen.writes:
                return place_in(screen.state)
            if screen.state not in places:
                places[screen.state] = stack.enter_context(place_in(screen.state))
            return contextlib.nullcontext(places[screen.state])

        yield find

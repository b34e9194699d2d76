"""Drives the screen of `tr11 top` by keys, and reads what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.pins.states import Place
from tr11ops import api
from tr11ops.base.errors import Refusal
from tr11ops.base.installed import missing

needs_textual = pytest.mark.skipif(bool(missing(("textual",))), reason='pip install "tr11[top]"')


def runs_of(place: Place) -> Callable[[], Sequence[api.Run | Refusal]]:
    def find() -> Sequence[api.Run | Refusal]:
        return list(api.runs_below(place.folder, "local"))

    return find


def drive(place: Place, keys: Callable[[Any, Any], Awaitable[None]]) -> None:
    """Start the screen, wait for its first look, and press keys."""
    from tr11ops.top.app import TopApp

    async def session() -> None:
        app = TopApp(runs_of(place), 3600.0)
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            await keys(app, pilot)

    asyncio.run(session())


async def settled(app: Any, pilot: Any) -> None:
    await app.workers.wait_for_complete()
    await pilot.pause()


def shown(app: Any) -> list[tuple[str, ...]]:
    from textual.widgets import DataTable

    table = app.screen_stack[0].query_one(DataTable)
    return [tuple(table.get_row_at(line)) for line in range(table.row_count)]


def head(app: Any) -> str:
    return str(app.screen_stack[0].query_one("#head").render())


def text(app: Any) -> str:
    return str(app.screen.query_one("#text").render())

"""Drives the screen of `tr11 top` by keys, and reads what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.pins.states import Place
from tr11ops.base.installed import missing

needs_textual = pytest.mark.skipif(bool(missing(("textual",))), reason='pip install "tr11[top]"')


def drive(place: Place, keys: Callable[[Any, Any], Awaitable[None]]) -> None:
    """Start the screen, wait for its first look, and press keys."""
    from tr11ops.top.app import TopApp
    from tr11ops.top.looks import RunLooks

    async def session() -> None:
        app = TopApp(RunLooks((place.folder,), "local"), 3600.0)
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


def sentence(app: Any) -> str:
    return str(app.screen_stack[0].query_one("#why").render())


def more(app: Any) -> str:
    """What is said below the table of the line with the cursor."""
    return str(app.screen_stack[0].query_one("#more").render())


def text(app: Any) -> str:
    return str(app.screen.query_one("#text").render())

"""`tr11 top` over a recorded healthy run, driven by keys as a person presses them, at 80x24."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.pins.commands import beside
from tests.pins.states import Place, place_in
from tests.tr11ops.top.screen import drive, head, needs_textual, settled, shown, text
from tr11ops import api
from tr11ops.top.tables import (
    LookedAt,
    TopRow,
    TopTable,
    attempts_table,
    column_widths,
    nodes_table,
    runs_table,
)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with place_in("healthy") as made, beside(made.folder):
        yield made


# ----------------------------------------------------------------------------- tables
def test_what_needs_a_person_comes_first_and_what_is_not_seen_next(place: Place) -> None:
    (run,) = api.runs_below(place.folder, "local")
    assert isinstance(run, api.Run)
    # the recorded run was healthy long ago: seen now, it stalls
    stalled = LookedAt("z", "z/main", run.look())
    unseen = LookedAt("b", "b/main", None, "its card cannot be read")
    table = runs_table((unseen, stalled))
    assert table.rows[0].cells[:2] == ("z/main", "stalled")
    assert table.sentence == "2 runs, 1 needs a person"
    assert table.rows[1].cells[1:] == ("unknown", "-", "-", "-", "-", "its card cannot be read")
    assert attempts_table(unseen).rows == ()
    assert nodes_table(unseen, "1").sentence == "its card cannot be read"


def test_a_filter_takes_words_in_any_order() -> None:
    table = TopTable("t", ("a",), (TopRow("", ("n01", "Excluded")), TopRow("", ("n02", ""))))
    assert [row.cells[0] for row in table.filtered("excl 01").rows] == ["n01"]
    assert table.filtered("").rows == table.rows


def test_no_cell_is_cut_but_the_last_which_gets_what_is_left() -> None:
    table = TopTable(
        "t", ("id", "why"), (TopRow("", ("4_[2-3%1]", "w" * 99)), TopRow("", ("1", "")))
    )
    assert column_widths(table, 80) == (9, 80 - 9 - 4)
    assert column_widths(table, 10) == (9, 8)
    assert column_widths(TopTable("t", ("id", "why"), ()), 80) == (2, 8)


# ----------------------------------------------------------------------------- keys
@needs_textual
def test_enter_goes_from_runs_to_ranks_and_escape_back(place: Place) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        assert [row[:2] for row in shown(app)] == [("small/main", "stalled")]
        await pilot.press("enter")
        assert "small/main: attempts" in head(app)
        assert shown(app)[0][1] == "running"
        await pilot.press("enter")
        nodes = shown(app)
        assert {row[0] for row in nodes} == set(app._looks[0].look.status.nodes)
        await pilot.press("enter")
        assert shown(app), "ranks"
        assert app._shown.columns == ("rank", "step", "phase", "silent", "pid")
        for _ in range(3):
            await pilot.press("escape")
        assert [row[0] for row in shown(app)] == ["small/main"]

    drive(place, keys)


@needs_textual
def test_the_filter_narrows_and_escape_shows_all(place: Place) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("slash", *"nothing")
        assert shown(app) == []
        await pilot.press("escape")
        assert len(shown(app)) == 1
        await pilot.press("slash", *"small", "enter", "enter")
        assert "attempts" in head(app)

    drive(place, keys)


@needs_textual
def test_kill_shows_the_commands_own_preview_and_nothing_else_happens(place: Place) -> None:
    switch = Path(place.run) / "kill-switch"

    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("k")
        await settled(app, pilot)
        assert "nothing was changed (--dry-run)" in text(app)
        assert "to carry it out" in text(app)
        await pilot.press("y", "y", "n")
        await settled(app, pilot)
        assert len(app.screen_stack) == 1
        assert not switch.exists()

    drive(place, keys)


@needs_textual
def test_a_stopped_run_is_let_go_on_by_its_plans_keys(place: Place) -> None:
    switch = Path(place.run) / "kill-switch"

    async def keys(app: Any, pilot: Any) -> None:
        for key in ("k", "u"):
            await pilot.press(key)
            await settled(app, pilot)
            assert "to carry it out" in text(app)
            await pilot.press(*app.screen._keys)
            await settled(app, pilot)
            assert switch.exists() is (key == "k")
            await pilot.press("escape")

    drive(place, keys)


@needs_textual
def test_a_key_pressed_again_asks_for_no_second_plan_and_y_counts_once(place: Place) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("k", "k", "k")
        await settled(app, pilot)
        assert len(app.screen_stack) == 2, "one plan"
        await pilot.press("n")
        await pilot.press("k")
        await settled(app, pilot)
        plan, done = app.screen, []
        plan._apply = partial(done.append, "carried out")
        await pilot.press("y", *plan._keys, *plan._keys)
        await settled(app, pilot)
        assert done == ["carried out"] and len(app.screen_stack) == 1

    drive(place, keys)


@needs_textual
def test_log_diagnosis_and_help_are_read_and_left(place: Place) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        for key, part in (("l", "iteration"), ("d", "verdict"), ("question_mark", "tr11 kill")):
            await pilot.press(key)
            await settled(app, pilot)
            assert part in text(app), key
            await pilot.press("escape")
            assert len(app.screen_stack) == 1

    drive(place, keys)

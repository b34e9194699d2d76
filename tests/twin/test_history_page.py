"""The page of the history that was played: it is the one that its run wrote, and its sums are those of its
rows.
"""

from __future__ import annotations

from msgspec.structs import replace

from tests.twin.fault_scenario import NOT_PLAYED, read_scenario
from tests.twin.history_page import FOLDER, PAGE, ROOT, History, pages, read_history
from tests.twin.site_incidents import Copies

SCENARIO = ROOT / "tests" / "twin" / "scenarios" / "tr11-176b.toml"


def page(history: History) -> str:
    return pages(history)[PAGE]


def test_the_pages_are_of_the_history_that_was_kept() -> None:
    for name, text in pages(read_history()).items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text


def test_every_trouble_of_the_scenario_is_told_in_its_order() -> None:
    events = [event.title for event in read_scenario(SCENARIO).events]
    assert [row.event.title for row in read_history().rows] == events


def test_what_came_out_wrong_is_said() -> None:
    history = read_history()
    first, *others = history.rows
    wrong = replace(history, rows=(replace(first, wrong=("a node was lost",)), *others))
    said = f"Otherwise than it should be: {first.event.title}: a node was lost"
    assert said in page(wrong) and said not in page(history)


def test_what_was_not_played_is_in_no_sum() -> None:
    history = read_history()
    played = [row for row in history.rows if row.event.fault != NOT_PLAYED]
    more = replace(history, rows=(*history.rows, replace(played[-1], mails=("one", "two"))))
    mails = sum(len(row.mails) for row in played)
    assert f"tr11 wrote {mails} mails" in page(history)
    assert f"tr11 wrote {mails + 2} mails" in page(more)


def test_a_row_tells_its_copies_and_that_it_was_played_alone() -> None:
    history = read_history()
    first = replace(history.rows[0], copies=Copies(7, 3, 412), is_alone=True, nodes=12)
    told = pages(replace(history, rows=(first, *history.rows[1:])))
    assert "| 7 | 3 | 412 |" in told[PAGE] and "in runs of their own" in told[PAGE]
    assert any("Played in a run of its own, on 12 nodes." in text for text in told.values())
    counted = [replace(row, copies=Copies(1, 0, 0)) for row in history.rows]
    said = "the trouble was played before copies were counted"
    assert said not in page(replace(history, rows=tuple(counted)))
    assert said in page(replace(history, rows=(replace(counted[0], copies=None), *counted[1:])))

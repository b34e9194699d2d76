"""Each event of the site in each phase of the run: verdict, act and mail as docs/reference/site-events.md
says, and never a lie.
"""

from __future__ import annotations

import pytest

from tests.tr11ops.watchdog.site_events import DOCUMENT, EVENTS, PHASES, Event, conclude, document
from tr11ops.detect.detector import Severity
from tr11ops.watchdog.verdict import VerdictWord

CELLS = [(event, name) for event in EVENTS for name in PHASES if event.cell(name) is not None]
IDS = [f"{event.name}-{name}" for event, name in CELLS]


@pytest.mark.parametrize(("event", "name"), CELLS, ids=IDS)
def test_what_is_concluded(event: Event, name: str) -> None:
    cell = event.cell(name)
    assert cell is not None
    found = conclude(cell)
    word, code = found.verdict.word, found.verdict.exit_code
    said = f"{word}: {found.verdict.why}"
    row = f"| {name} | {' | '.join(found.row())} |"
    section = DOCUMENT.read_text(encoding="utf-8").split(
        f"## {event.name[:1].upper()}{event.name[1:]}\n"
    )[1]
    assert row in section.split("\n## ")[0], (
        f"docs/reference/site-events.md: python -m tests.tr11ops.watchdog.site_events; {said}"
    )
    assert found.may_sleep is not True or cell.trains, (
        f"nothing trains by itself, and a person may sleep: {said}"
    )
    # a moment later
    is_told = _is_told(event, name) or (
        name in {"last hour", "leaving"} and _is_told(event, "queued")
    )
    assert cell.trains or word in {VerdictWord.STOPPED, VerdictWord.UNKNOWN} or is_told, (
        f"nothing trains, and no one is told: {said}"
    )
    assert (word is VerdictWord.UNKNOWN) == (code == 3), said
    assert word is not VerdictWord.UNKNOWN or (found.may_sleep is None and not found.acts), (
        f"concluded from silence: {said}"
    )
    assert found.may_sleep is not True or code == 0, said
    assert not (cell.trains and word in {VerdictWord.DOWN, VerdictWord.STALLED}), (
        f"it trains, and is called {said}"
    )


def _is_told(event: Event, name: str) -> bool:
    cell = event.cell(name)
    loudest = None if cell is None else conclude(cell).loudest
    return loudest is not None and loudest >= Severity.WARNING


def test_the_document_is_the_table() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_every_phase_is_hit_by_most_events() -> None:
    hit = {name: sum(event.cell(name) is not None for event in EVENTS) for name in PHASES}
    assert all(count >= 0.6 * len(EVENTS) for count in hit.values()), hit

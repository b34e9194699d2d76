"""Sentences for a person fit the terminal; where there is none, a line is one line."""

from __future__ import annotations

import io
import sys

import pytest

from tr11ops.cli import common
from tr11ops.cli.common import drawing_console, say, show, table

LONG = "jobs:       nothing of this run is running or queued; launches are refused until the switch is released"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "indent"), [(LONG, 12), (f"tr11: {'words ' * 30}`tr11 nodes exclude n1 --force`", 2)]
)
def test_what_is_said_fits_the_terminal(
    text: str, indent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    say(text)
    first, *others = screen.getvalue().splitlines()
    assert others and max(len(line) for line in (first, *others)) <= 80
    assert all(line.startswith(" " * indent) and line[indent] != " " for line in others)
    assert " ".join([first, *(line.strip() for line in others)]) == text


WHY = "the site: the scheduler lost it, and it did not come back since"


def nodes_shown(width: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    made = table("NODE", "STATE", "JOBS", "EXPIRY", "WHY")
    made.add_row("jean-zay-iam01", "down+not_responding", "8_[2-10%1]", "for 13 d 23 h", WHY)
    made.add_row("jean-zay-iam02", "idle", "", "", "")
    console = drawing_console()
    console._force_terminal, console.width = True, width
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "drawing_console", lambda: console)
        show(made)
    return capsys.readouterr().out.splitlines()


def test_a_sentence_without_room_in_its_column_stands_below_its_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [line.rstrip() for line in nodes_shown(80, capsys)]
    assert found == [
        "NODE            STATE                JOBS        EXPIRY",
        "jean-zay-iam01  down+not_responding  8_[2-10%1]  for 13 d 23 h",
        f"    {WHY}",
        "jean-zay-iam02  idle",
    ]
    wide = nodes_shown(120, capsys)
    assert wide[0].split() == ["NODE", "STATE", "JOBS", "EXPIRY", "WHY"]


def test_what_fits_or_goes_to_a_file_stays_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for screen, text in ((Terminal(), "short\nand of two lines"), (io.StringIO(), LONG)):
        monkeypatch.setattr(sys, "stderr", screen)
        say(text)
        assert screen.getvalue() == text + "\n"

"""Sentences for a person fit the terminal; where there is none, a line is one line."""

from __future__ import annotations

import io
import sys

import pytest

from tr11ops.cli.common import say

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


def test_what_fits_or_goes_to_a_file_stays_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for screen, text in ((Terminal(), "short\nand of two lines"), (io.StringIO(), LONG)):
        monkeypatch.setattr(sys, "stderr", screen)
        say(text)
        assert screen.getvalue() == text + "\n"

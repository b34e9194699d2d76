"""The page of every command: one form, 80 columns, its group, and what it accepts without showing
it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from unittest.mock import patch

import pytest

from tests.pins.commands import typed
from tests.tr11ops.cli.shown_commands import every_command
from tr11ops.cli import main
from tr11ops.cli.main import flowing

PLACES = {
    "Set up": "init doctor estimate import data",
    "Run": "launch train pause resume kill checkpoint-now requeue",
    "Watch": "status logs alerts handover goodput advise report",
    "Keep alive": "pulse cron nodes fs-watchdog perms drill",
    "Checkpoints": "checkpoints backup sync upload eval",
    "Rehearse": "replay twin",
}

BRACKETED = re.compile(r"\[[^\]]*\]")


def page(words: str) -> str:
    with (
        patch.dict(os.environ, {"COLUMNS": "80", "TERM": "dumb"}),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        code, text = typed((*words.split(), "--help"))
    assert code == 0, words
    return text


def test_the_front_page_has_each_command_in_its_group() -> None:
    blocks = dict(block.split("\n", 1) for block in page("").split("\n\n") if "\n" in block)
    for title, names in PLACES.items():
        shown = re.findall(r"^  ([a-z-]+) ", blocks[title], re.MULTILINE)
        assert set(names.split()) <= set(shown), title
        assert shown == list(main.GROUPS[title])


def test_every_page_has_examples_and_no_type_on_flags() -> None:
    for words, command in every_command():
        text = page(words)
        assert max(map(len, text.splitlines())) <= 80, words
        assert "<bool>" not in text and "BOOLEAN" not in text, words
        assert "Example:" not in text and "Examples:" not in text, words
        lines = [line.rstrip() for line in text.splitlines()]
        assert " Examples" in lines, words
        first = lines[lines.index(" Examples") + 1]
        assert re.match(r'   (tr11 |eval "\$\(tr11 )\w', first), (words, first)
        assert command.help and not command.help.startswith("["), words
        bracketed = {part for each in command.params for part in BRACKETED.findall(each.help or "")}
        assert bracketed <= set(BRACKETED.findall(" ".join(re.sub(r"│", " ", text).split()))), words


def test_every_example_is_a_command_whose_options_exist() -> None:
    commands = dict(every_command())
    for words, command in commands.items():
        for line in re.findall(r"^  tr11 (.*)$", command.help or "", re.MULTILINE):
            parts = line.split()
            name = " ".join(parts[:2]) if " ".join(parts[:2]) in commands else parts[0]
            known = {
                name
                for option in commands[name].params
                for name in (*option.opts, *option.secondary_opts)
            }
            given = set(
                re.findall(
                    r"(?<= )--[a-z][a-z-]*", " " + re.sub(r"\"[^\"]*\"|'[^']*'|\|.*", "", line)
                )
            )
            assert given - {"--help"} <= known or "-- " in line, (words, line)


def test_a_help_text_has_one_line_for_each_paragraph() -> None:
    text = """First,\n    and more.\n\n    Second\n    paragraph.\n\n    Examples:\n      tr11 nodes check a[1]\n    """
    assert (
        flowing(text)
        == "First, and more.\n\nSecond paragraph.\n\n[bold]Examples[/bold]\n  tr11 nodes check a[1]"
    )


@pytest.mark.parametrize("words", ["status", "logs"])
def test_help_is_asked_for_with_one_letter_too(words: str) -> None:
    assert typed((words, "-h"))[0] == 0

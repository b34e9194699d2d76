"""The commands of README and CONTRIBUTING exist with their options, and the first one comes early."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tr11ops.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.startswith("tr11 ")]


@pytest.mark.parametrize("line", LINES)
def test_a_command_is_taken(line: str) -> None:
    _, name, *rest = shlex.split(line, comments=True)
    command = main.load(name)
    context = None
    while hasattr(command, "commands"):
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
        name, *rest = rest
        command = command.commands[name]
    command.make_context(name, list(rest), parent=context)


def test_the_first_command_comes_within_a_screenful() -> None:
    before = README.partition("```sh")[0].splitlines()
    assert len(before) <= 30
    assert [
        name
        for name in ("init", "doctor", "data", "launch", "alerts", "cron", "status")
        if name not in README
    ] == []

"""Every command and group that is shown, with its parser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tr11ops.cli import main


def every_command() -> Iterator[tuple[str, Any]]:
    """Words and parser of each command that is shown, groups too."""
    for name in main.COMMANDS:
        command = main.load(name)
        yield name, command
        for inner, parser in getattr(command, "commands", {}).items():
            if not parser.hidden:
                yield f"{name} {inner}", parser

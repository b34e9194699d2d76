"""How a command's page looks: examples in one form, no type on flags, former spellings accepted and
not shown.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperCommand, TyperGroup

_TAG = re.compile(r"\[(?=[a-z#/@])")  # what the terminal library would take for mark-up
EXAMPLES = "Examples:"  # the line of a docstring before the commands, one a line


def flowing(text: str) -> str:
    """A docstring for a terminal of any width: each paragraph on one line, "Examples" in bold over
    its commands.
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    joined = "\n\n".join(re.sub(r"(?<=\S)\n(?=\S)", " ", paragraph) for paragraph in paragraphs)
    head, line, commands = joined.partition(f"{EXAMPLES}\n")
    if not line:
        return joined
    gap = (
        "" if "\n\n" in head.rstrip() else "\n"
    )  # typer dedents what follows the first paragraph but for its first line
    return f"{head}{gap}[bold]Examples[/bold]\n" + _TAG.sub(r"\\[", commands)


class _Page:
    """What `PageCommand` and `PageGroup` have in common."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for option in found:
            if getattr(option, "is_flag", False):
                option.display_type_rich = _no_type
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _first_spellings(self.get_params(ctx)):
            super().format_help(ctx, formatter)  # type: ignore[misc]


class PageCommand(_Page, TyperCommand):
    """A command with such a page."""


class PageGroup(_Page, TyperGroup):
    """A group of commands with such a page."""


def _no_type(ctx: Any) -> None:
    """A flag takes no value."""


def shown_spellings(option: Any) -> list[str]:
    """The names of an option (or an argument's) that its page shows."""
    former = [name for name in option.opts if name.startswith("--")][1:]
    return [name for name in option.opts if name not in former]


@contextmanager
def _first_spellings(params: list[Any]) -> Iterator[None]:
    """Of several long names of an option the first is its name; the others are former ones, which
    are not shown.
    """
    before = [(option, option.opts) for option in params if option.param_type_name == "option"]
    for option, _ in before:
        option.opts = shown_spellings(option)
    try:
        yield
    finally:
        for option, names in before:
            option.opts = names

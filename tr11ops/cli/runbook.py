"""`tr11 runbook`: the page that says what to do about an alert."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

import typer

from tr11ops.base.errors import Refusal
from tr11ops.base.runbook_pages import page_lines, page_names, page_title, pages_about
from tr11ops.cli.common import JsonOption
from tr11ops.cli.context import emit
from tr11ops.detect.runbooks import page_of, page_of_word

SCHEMA = 1
WIDTH = 78
MOST_SHOWN = 4


def runbook(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            show_default=False,
            help="A page, an alert's detector, or what people call the trouble: nan.",
            autocompletion=page_names,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the page that says what to do about an alert; without NAME, list the pages.

    `tr11 status` and each alert's mail name the page.

    Examples:
      tr11 runbook
      tr11 runbook hung
      tr11 runbook nan
    """
    pages = page_names()
    if name is None:
        titles = {page: page_title(page) for page in pages}
        if as_json:
            emit(
                {
                    "schema": SCHEMA,
                    "pages": [{"name": page, "title": title} for page, title in titles.items()],
                }
            )
            return
        typer.echo("Read one with `tr11 runbook NAME`:")
        for page in titles:
            typer.echo(f"  {page}")
        return
    page = name.removeprefix("runbooks/").removesuffix(".md")
    if page not in pages:
        page = (page_of_word(page) or page_of(page)).removesuffix(".md")
    if page not in pages:
        raise Refusal(f"NAME {name!r}: there is no such page; {_hint(page, pages)}", exit_code=2)
    title, lines = page_title(page), page_lines(f"{page}.md", WIDTH)
    if as_json:
        emit({"schema": SCHEMA, "name": page, "title": title, "lines": list(lines)})
        return
    typer.echo(title)
    for line in lines:
        typer.echo(line)


def _hint(word: str, pages: tuple[str, ...]) -> str:
    """What may have been meant: a name like it, or pages that speak of it."""
    near = get_close_matches(word, pages, 1) or [one for one in pages if one.startswith(word)]
    if near:
        return f"did you mean {near[0]}?"
    about = pages_about(word)
    if about:
        return f"these speak of it: {', '.join(about[:MOST_SHOWN])}"
    return "`tr11 runbook` lists them"

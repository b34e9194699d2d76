"""The pages as HTML: every text is escaped, and nothing is asked of another host."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

FOLDER = Path(__file__).parent / "assets"
REPORT = Path(__file__).parents[1] / "report" / "assets"
# what a browser may ask for, and where it lies
ASSETS = {
    "serve.css": ((REPORT / "report.css", FOLDER / "serve.css"), "text/css"),
    "serve.js": ((FOLDER / "serve.js",), "text/javascript"),
    "charts.js": ((REPORT / "report.js",), "text/javascript"),
}


def coded(words: str) -> Markup:
    """A text as HTML; what stands between backticks is shown as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(words))))


@cache
def asset(name: str) -> tuple[bytes, str]:
    """A style sheet or a script, and its kind. Raises KeyError for another name."""
    places, kind = ASSETS[name]
    return b"\n".join(place.read_bytes() for place in places), kind


class Pages:
    """Renders templates; `is_part`: only what changes of a page."""

    def __init__(self) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(FOLDER),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )

        self._environment.filters["coded"] = coded

    def render(self, name: str, **values: Any) -> str:
        """One page."""
        return str(self._environment.get_template(f"{name}.html.j2").render(page=name, **values))

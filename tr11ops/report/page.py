"""The report page as values, and those values as one file of HTML that needs nothing else. No decisions here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Column:
    """A table's column; numbers stand to the right."""

    title: str
    is_number: bool = False
    is_wide: bool = False


@dataclass(frozen=True)
class Cell:
    """One cell's text. `style`: "critical" or "warning" where it is to stand out, "code" for what is typed, "time"; a
    colour such as #2f8f4e is shown as a small square before the text."""

    text: str
    style: str = ""
    is_number: bool = False
    is_wide: bool = False

    @property
    def colour(self) -> str:
        return self.style if self.style.startswith("#") else ""


@dataclass(frozen=True)
class Table:
    """A table; `rows` hold one cell a column."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Section:
    """One part of the page: lines of text, a chart (HTML), a table, and a word for "there is none"."""

    key: str
    title: str
    lines: tuple[str, ...] = ()
    chart: str = ""
    table: Table | None = None
    empty: str = ""


@dataclass(frozen=True)
class Figure:
    """One number at the top of the page."""

    name: str
    value: str


@dataclass(frozen=True)
class Page:
    """The whole page. `share` is the progress in percent, None where the end is not known."""

    name: str
    verdict: str
    verdict_class: str
    answer: str
    why: str
    share: float | None
    progress: str
    figures: tuple[Figure, ...]
    sections: tuple[Section, ...]
    footer: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.name}: report"


def table(columns: Sequence[Column], rows: Sequence[Sequence[str | tuple[str, str]]]) -> Table | None:
    """A table of texts, or of (text, style); None without rows."""
    if not rows:
        return None
    return Table(
        tuple(columns),
        tuple(
            tuple(_cell(cell, column) for cell, column in zip(row, columns, strict=True))
            for row in rows
        ),
    )  # fmt: skip


def _cell(cell: str | tuple[str, str], column: Column) -> Cell:
    text, style = cell if isinstance(cell, tuple) else (cell, "")
    return Cell(text, style, column.is_number, column.is_wide)


def render(page: Page, script: str) -> str:
    """The page as HTML. Every text is escaped; `script` is plotly's, put in once, before the first chart."""
    import jinja2

    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return str(environment.get_template("report.html.j2").render(page=page, script=script))

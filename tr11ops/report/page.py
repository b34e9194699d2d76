"""The report page as values, without how they look; and as one file of HTML that needs nothing
else: styles and script are inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from trainer.contract.record import Record
from trainer.contract.units import shortened


class Column(Record):
    """A table's column; numbers stand to the right."""

    title: str
    is_number: bool = False
    is_wide: bool = False


class Cell(Record):
    """One cell's text. `style`: "critical" or "warning" where it is to stand out, "code" for a
    command, "time". `swatch` is the class of a small square of colour before the text.
    """

    text: str
    style: str = ""
    swatch: str = ""


class Table(Record):
    """A table; `rows` hold one cell a column."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def is_wide(self) -> bool:
        """Whether its columns have no room beside each other on a phone: each row is shown as a
        card there.
        """
        return len(self.columns) > 4 or any(column.is_wide for column in self.columns)


class ReportSection(Record):
    """One part of the page: lines of text, charts (HTML), a table, and a line where there is none."""

    key: str
    title: str
    lines: tuple[str, ...] = ()
    charts: tuple[str, ...] = ()
    table: Table | None = None
    empty: str = ""


class Tile(Record):
    """One number at the top of a page; `note` says more of it."""

    name: str
    value: str
    note: str = ""


class Page(Record):
    """The whole page. `sentence` sums it up; `share` is the progress in percent, None where the end
    is not known.
    """

    name: str
    sentence: str
    verdict: str
    verdict_class: str
    answer: str
    why: str
    share: float | None
    progress: str
    tiles: tuple[Tile, ...]
    sections: tuple[ReportSection, ...]
    footer: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.name}: report"

    @property
    def has_charts(self) -> bool:
        return any(section.charts for section in self.sections)


LONGEST_CELL = 300  # characters: a rank's error may have as many lines


def table(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> Table | None:
    """A table of texts; None without rows."""
    if not rows:
        return None
    return Table(tuple(columns), tuple(tuple(map(_cell, row)) for row in rows))


def _cell(given: str | Cell) -> Cell:
    cell = given if isinstance(given, Cell) else Cell(given)
    return replace(cell, text=shortened(cell.text, LONGEST_CELL))


FOLDER = Path(__file__).parent / "assets"


def render(page: Page) -> str:
    """The page as HTML. Every text is escaped; the script is there only where a chart is."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    style = (FOLDER / "report.css").read_text(encoding="utf-8")
    script = ""
    if page.has_charts:
        script = (FOLDER / "report.js").read_text(encoding="utf-8")
    return str(
        environment.get_template("report.html.j2").render(page=page, style=style, script=script)
    )

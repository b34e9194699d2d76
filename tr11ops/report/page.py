"""The report page as values, without how they look; and as one file of HTML that needs nothing
else: styles and script are inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.contract.record import Record
from trainer.contract.units import shortened


class Column(Record):
    """A table's column; numbers stand to the right."""

    title: str
    is_number: bool = False
    is_wide: bool = False


class Cell(Record):
    """One cell's text. `style`: "critical" or "warning" where it is to stand out, "code" for a
    command, "time".

    `swatch` is the class of a small square of colour before the text. `title` is the column's, for
    narrow screens.
    """

    text: str
    title: str = ""
    style: str = ""
    swatch: str = ""
    is_number: bool = False
    is_wide: bool = False


class Styled(Record):
    """A cell's text with a style or a swatch, see Cell."""

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
    """One number at the top of the page."""

    name: str
    value: str


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


def table(columns: Sequence[Column], rows: Sequence[Sequence[str | Styled]]) -> Table | None:
    """A table of texts; None without rows."""
    if not rows:
        return None
    cells = (
        tuple(_cell(cell, column) for cell, column in zip(row, columns, strict=True))
        for row in rows
    )
    return Table(tuple(columns), tuple(cells))


LONGEST_CELL = 300  # characters: a rank's error may have as many lines


def _cell(cell: str | Styled, column: Column) -> Cell:
    if isinstance(cell, Styled):
        text = cell
    else:
        text = Styled(cell)
    return Cell(
        shortened(text.text, LONGEST_CELL),
        column.title,
        style=text.style,
        swatch=text.swatch,
        is_number=column.is_number,
        is_wide=column.is_wide,
    )


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

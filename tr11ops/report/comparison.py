"""A comparison of runs as a page: the courses over each other, and the table. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tr11ops.curves.compare import CurveComparison, axis_text
from tr11ops.curves.curve import RunCurve
from tr11ops.report.charts.lines import Curve, Panel, Readout, line_chart, number
from tr11ops.report.charts.scale import Scale
from tr11ops.report.page import Column, Page, ReportSection, Table, table

COLOURS = ("blue", "orange", "green", "purple", "grey")
MOST_POINTS = 400  # of a curve


def page_of_comparison(curves: Sequence[RunCurve], compared: CurveComparison, axis: str, value: str, made: str) -> Page:
    """`made` says when the page was made."""
    sentences = tuple(compared.sentence(index, axis) for index in range(1, len(curves)))
    title = f"{value} by {axis}"
    return Page(
        name=" against ".join(compared.names),
        sentence=sentences[0],
        verdict="",
        verdict_class="",
        answer="",
        why="",
        share=None,
        progress="",
        tiles=(),
        sections=(
            ReportSection("curves", title, sentences[1:], (_chart(curves, axis, value),)),
            ReportSection(
                "table", "Side by side", (f"Means of the last {compared.lines} lines up to each place.",),
                table=comparison_table(compared, axis),
            ),
        ),
        footer=(f"Made by tr11 {made}.", "This page needs no network: everything is inside the file."),
    )  # fmt: skip


def comparison_table(compared: CurveComparison, axis: str) -> Table | None:
    """The rows beside each other; `~` before a difference that may be noise."""
    columns = [Column(axis, True), *(Column(name, True) for name in compared.names)]
    columns += [Column(f"{name} - {compared.names[0]}", True) for name in compared.names[1:]]
    return table(columns, [comparison_cells(compared, index, axis) for index in range(len(compared.rows))])


def comparison_cells(compared: CurveComparison, index: int, axis: str) -> list[str]:
    """One row's texts: the place, each level, each difference to the first; `~` before one that may be noise."""
    row = compared.rows[index]
    levels = [f"{level.mean:.4f}" if abs(level.mean) >= 0.01 else f"{level.mean:.4g}" for level in row.levels]
    differences = [
        f"{'' if row.is_sure(other) else '~'}{row.difference(other):+.4g}" for other in range(1, len(row.levels))
    ]
    return [axis_text(row.x, axis), *levels, *differences]


def _chart(curves: Sequence[RunCurve], axis: str, value: str) -> str:
    """Two panels: means of stretches, and what was highest in each, so that no spike is lost among the means."""
    scale = Scale.over(place for curve in curves for place in (curve.x[0], curve.x[-1]))
    panels = [_panel(value, curves, _mean), _panel(f"{value}, the highest of each stretch", curves, max)]
    places = sorted({point[0] for curve in panels[0].curves for point in curve.points if point is not None})
    rows = [(x, (axis_text(x, axis), *(_shown(curve.level(x, 1).mean) for curve in curves))) for x in places]
    ticks = [(place, axis_text(place, axis)) for place in scale.ticks(7)]
    return line_chart("comparison", panels, scale, ticks, Readout((axis, *(curve.name for curve in curves)), rows))


def _panel(title: str, curves: Sequence[RunCurve], summary: Callable[[Sequence[float]], float]) -> Panel:
    drawn = tuple(
        Curve(curve.name, COLOURS[index % len(COLOURS)], _stretches(curve, summary))
        for index, curve in enumerate(curves)
    )
    values = [point[1] for curve in drawn for point in curve.points if point is not None]
    return Panel(title, drawn, is_log=min(values) > 0 and max(values) > 4 * min(values))


def _stretches(curve: RunCurve, summary: Callable[[Sequence[float]], float]) -> list[tuple[float, float] | None]:
    """One point for each of at most MOST_POINTS stretches of equally many lines."""
    width = -(-len(curve.x) // MOST_POINTS)
    return [
        (curve.x[min(begin + width, len(curve.x)) - 1], summary(curve.y[begin : begin + width]))
        for begin in range(0, len(curve.x), width)
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _shown(value: float) -> str:
    return number(value) if math.isfinite(value) else "-"

"""A comparison of runs as a page: the courses over each other, and the table. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tr11ops.curves.compare import CurveComparison, axis_text
from tr11ops.curves.curve import RunCurve, wants_logarithm
from tr11ops.report.charts.lines import Curve, Panel, Readout, line_chart, number
from tr11ops.report.charts.scale import Scale
from tr11ops.report.page import Column, Page, ReportSection, Table, table

COLOURS = ("blue", "orange", "green", "purple", "grey", "red", "teal", "brown")
MOST_POINTS = 400  # of a curve


def page_of_comparison(
    curves: Sequence[RunCurve],
    compared: CurveComparison,
    axis: str,
    value: str,
    made: str,
    within: str,
) -> Page:
    """`made` says when the page was made, `within` of which part of the courses; "" for all."""
    sentences = tuple(compared.sentence(index, axis) for index in range(1, len(curves)))
    title = " ".join(filter(None, (f"{value} by {axis}", within)))
    sections = (
        ReportSection("curves", title, sentences[1:], (comparison_chart(curves, axis, value),)),
        ReportSection(
            "table", "Side by side", (_means(compared),), table=comparison_table(compared, axis)
        ),
    )
    return page_of_sections(" against ".join(compared.names), sentences[0], sections, made)


def page_of_sections(
    name: str, sentence: str, sections: Sequence[ReportSection], made: str
) -> Page:
    """A page that is about no one run's state: a title, a sentence, and sections."""
    return Page(
        name=name,
        sentence=sentence,
        verdict="",
        verdict_class="",
        answer="",
        why="",
        share=None,
        progress="",
        tiles=(),
        sections=tuple(sections),
        footer=(
            f"Made by tr11 {made}.",
            "This page needs no network: everything is inside the file.",
        ),
    )


def comparison_section(
    curves: Sequence[RunCurve], compared: CurveComparison, axis: str, value: str, key: str
) -> ReportSection:
    """Curves over one axis, and their table; `key` is the section's own name in its page."""
    return ReportSection(
        key,
        f"{value} by {axis}",
        (_means(compared),),
        (comparison_chart(curves, axis, value, key),),
        table=comparison_table(compared, axis),
    )


def _means(compared: CurveComparison) -> str:
    return f"Means of the last {compared.lines} lines up to each place."


def comparison_table(compared: CurveComparison, axis: str) -> Table | None:
    """The rows beside each other; `~` before a difference that may be noise."""
    columns = [Column(axis, True), *(Column(name, True) for name in compared.names)]
    columns += [Column(f"{name} - {compared.names[0]}", True) for name in compared.names[1:]]
    return table(
        columns, [comparison_cells(compared, index, axis) for index in range(len(compared.rows))]
    )


def comparison_cells(compared: CurveComparison, index: int, axis: str) -> list[str]:
    """One row's texts: the place, each level, each difference to the first; `~` before one that may
    be noise.
    """
    row = compared.rows[index]
    levels = [
        f"{level.mean:.4f}" if abs(level.mean) >= 0.01 else f"{level.mean:.4g}"
        for level in row.levels
    ]
    differences = [
        f"{'' if row.is_sure(other) else '~'}{row.difference(other):+.4g}"
        for other in range(1, len(row.levels))
    ]
    return [axis_text(row.x, axis), *levels, *differences]


def comparison_chart(
    curves: Sequence[RunCurve], axis: str, value: str, key: str = "comparison"
) -> str:
    """Two panels: means of stretches, and what was highest in each, so that no spike is lost among
    the means.
    """
    scale = Scale.over(place for curve in curves for place in (curve.x[0], curve.x[-1]))
    panels = [
        _panel(value, curves, _mean),
        _panel(f"{value}, the highest of each stretch", curves, max),
    ]
    places = sorted(
        {point[0] for curve in panels[0].curves for point in curve.points if point is not None}
    )
    rows = [
        (x, (axis_text(x, axis), *(_shown(curve.level(x, 1).mean) for curve in curves)))
        for x in places
    ]
    ticks = [(place, axis_text(place, axis)) for place in scale.ticks(7)]
    return line_chart(
        key,
        panels,
        scale=scale,
        ticks=ticks,
        readout=Readout((axis, *(curve.name for curve in curves)), rows),
        x_title=axis,
    )


def _panel(
    title: str, curves: Sequence[RunCurve], summary: Callable[[Sequence[float]], float]
) -> Panel:
    drawn = tuple(
        Curve(curve.name, COLOURS[index % len(COLOURS)], _stretches(curve, summary))
        for index, curve in enumerate(curves)
    )
    values = [point[1] for curve in drawn for point in curve.points if point is not None]
    return Panel(title, drawn, is_log=wants_logarithm(min(values), max(values)))


def _stretches(
    curve: RunCurve, summary: Callable[[Sequence[float]], float]
) -> list[tuple[float, float] | None]:
    """One point for each of at most MOST_POINTS stretches of equally many lines."""
    width = -(-len(curve.x) // MOST_POINTS)
    return [
        (curve.x[min(begin + width, len(curve.x)) - 1], summary(curve.y[begin : begin + width]))
        for begin in range(0, len(curve.x), width)
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _shown(value: float) -> str:
    if math.isfinite(value):
        return number(value)
    return "-"

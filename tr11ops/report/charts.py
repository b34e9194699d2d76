"""The figures of the report page. Pure: from values to plotly figures; times are shown in the report's time zone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tr11ops.detect.finding import Severity
from tr11ops.report.series import Point, Series

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

INK, GRID, PAPER = "#1f2933", "#e4e7eb", "#ffffff"
BLUE, ORANGE, GREEN, RED, AMBER, GREY = "#2563ab", "#c2571a", "#2f8f4e", "#c81e1e", "#b7791f", "#9aa5b1"
SEVERITY_COLOURS = {Severity.INFO: GREY, Severity.WARNING: AMBER, Severity.CRITICAL: RED}
ROW_HEIGHT = 210
GAP_FACTOR = 5  # iterations that took so many times the usual time break the line
MOST_MARKS = 200
PANELS = (  # title, field of a point, colour, kind of axis, from zero, how numbers are written
    ("loss", "loss", BLUE, "log", False, "~g"),
    ("learning rate", "learning_rate", GREEN, "linear", True, "~e"),
    ("global batch, samples", "batch", ORANGE, "linear", True, "~g"),
    ("TFLOPs per GPU", "tflops", BLUE, "linear", False, "~g"),
    ("gradient norm", "grad_norm", GREY, "log", False, "~g"),
)


@dataclass(frozen=True)
class Mark:
    """Something that happened at a time, drawn through all panels. `end` is None for what has not ended."""

    time: float
    end: float | None
    severity: Severity
    label: str


def course(series: Series, marks: Sequence[Mark], zone: tzinfo) -> Figure:
    """Loss, learning rate with batch size, throughput and gradient norm over time, with incidents marked."""
    from plotly.graph_objects import Figure

    points = with_gaps(series.points)
    times = [stamp(point.time, zone) if point else None for point in points]
    custom = [[point.iteration, point.tokens / 1e9] if point else [None, None] for point in points]
    figure = Figure()
    height = 1.0 / len(PANELS)
    axes: dict[str, Any] = {}
    for row, (title, name, colour, kind, from_zero, numbers) in enumerate(PANELS):
        axis = "" if row == 0 else str(row + 1)
        top = 1.0 - row * height
        values = [drawable(getattr(point, name), kind) if point else None for point in points]
        figure.add_scatter(
            x=times, y=values, customdata=custom, name=title, yaxis=f"y{axis}", mode="lines",
            line={"color": colour, "width": 1.3},
            hovertemplate=f"%{{y:.4~g}} {title}<br>iteration %{{customdata[0]}}, %{{customdata[1]:.4~g}} B tokens"
            "<br>%{x|%Y-%m-%d %H:%M}<extra></extra>",
        )  # fmt: skip
        axes[f"yaxis{axis}"] = {
            "domain": [max(0.0, top - height * 0.92), top - height * 0.14], "type": kind, "gridcolor": GRID,
            "zeroline": False, "fixedrange": True, "nticks": 5, "tickformat": numbers, "minor": {"showgrid": False},
            "rangemode": "tozero" if from_zero else "normal",
        }  # fmt: skip
        figure.add_annotation(
            text=title, x=0, y=top - height * 0.13, xref="paper", yref="paper", showarrow=False, xanchor="left",
            yanchor="bottom", font={"size": 12, "color": INK},
        )  # fmt: skip
    for mark in marks[:MOST_MARKS]:
        _draw_mark(figure, mark, zone)
    figure.update_layout(
        **axes,
        xaxis={"type": "date", "gridcolor": GRID, "anchor": f"y{len(PANELS)}", "showspikes": True,
               "spikemode": "across", "spikethickness": 1, "spikedash": "dot", "spikecolor": GREY},
        height=ROW_HEIGHT * len(PANELS), margin={"l": 46, "r": 10, "t": 10, "b": 30}, showlegend=False,
        paper_bgcolor=PAPER, plot_bgcolor=PAPER, font={"color": INK, "size": 11}, hovermode="closest",
        dragmode="zoom",
    )  # fmt: skip
    return figure


def _draw_mark(figure: Figure, mark: Mark, zone: tzinfo) -> None:
    colour = SEVERITY_COLOURS[mark.severity]
    start = stamp(mark.time, zone)
    figure.add_shape(
        type="line", x0=start, x1=start, y0=0, y1=1, yref="paper", line={"color": colour, "width": 1, "dash": "dot"}
    )
    if mark.end is not None and mark.end > mark.time:
        figure.add_shape(
            type="rect", x0=start, x1=stamp(mark.end, zone), y0=0, y1=1, yref="paper", fillcolor=colour,
            opacity=0.10, line={"width": 0}, layer="below",
        )  # fmt: skip


def with_gaps(points: Sequence[Point]) -> list[Point | None]:
    """The points with None where the training stood still or went back, so that no line is drawn across that.

    It stood still where an iteration took `GAP_FACTOR` times the median of all, and a minute or more in all.
    """
    paces = sorted(_pace(first, second) for first, second in pairwise(points))
    slowest = GAP_FACTOR * paces[len(paces) // 2] if paces else math.inf
    result: list[Point | None] = list(points[:1])
    for first, second in pairwise(points):
        still = second.time - first.time > 60.0 and _pace(first, second) > slowest
        if still or second.iteration < first.iteration:
            result.append(None)
        result.append(second)
    return result


def _pace(first: Point, second: Point) -> float:
    """Seconds an iteration took from one point to the next."""
    return (second.time - first.time) / max(1, second.iteration - first.iteration)


def drawable(value: float, kind: str) -> float | None:
    """The value where an axis of this kind can show it: no NaN, nothing below zero on a logarithmic one."""
    if not math.isfinite(value) or (kind == "log" and value <= 0):
        return None
    return float(f"{value:.5g}")


def stamp(time: float, zone: tzinfo) -> str:
    """The moment as plotly reads dates, in the report's own time zone."""
    return datetime.fromtimestamp(time, tz=zone).strftime("%Y-%m-%d %H:%M:%S")


def stacked(rows: Sequence[str], parts: Iterable[tuple[str, str, Sequence[float]]], unit: str) -> Figure:
    """One horizontal bar a row, of coloured parts: (name, colour, one value a row), in `unit`. No legend."""
    from plotly.graph_objects import Figure

    figure = Figure()
    for name, colour, values in parts:
        if any(values):
            figure.add_bar(
                y=list(rows), x=[float(f"{value:.5g}") for value in values], name=name, orientation="h",
                marker={"color": colour}, hovertemplate=f"%{{y}}: %{{x:.4~g}} {unit} {name}<extra></extra>",
            )  # fmt: skip
    figure.update_layout(
        barmode="stack", showlegend=False, height=70 + 22 * max(2, len(rows)),
        margin={"l": 10, "r": 10, "t": 10, "b": 30},
        paper_bgcolor=PAPER, plot_bgcolor=PAPER, font={"color": INK, "size": 11}, bargap=0.25,
        xaxis={"gridcolor": GRID, "title": unit, "fixedrange": True},
        yaxis={"autorange": "reversed", "automargin": True, "fixedrange": True, "type": "category"},
    )  # fmt: skip
    return figure


@dataclass(frozen=True)
class Span:
    """One stretch of time of one row, e.g. a node that trained in an attempt."""

    row: str
    begin: float
    end: float
    kind: str
    label: str


def timeline(spans: Sequence[Span], colours: dict[str, str], zone: tzinfo) -> Figure:
    """One line a row, with coloured stretches: which node did what, and when."""
    from plotly.graph_objects import Figure

    figure = Figure()
    rows = sorted({span.row for span in spans})
    for kind, colour in colours.items():
        chosen = [span for span in spans if span.kind == kind]
        if chosen:
            figure.add_bar(
                y=[span.row for span in chosen], x=[1000.0 * max(1.0, span.end - span.begin) for span in chosen],
                base=[stamp(span.begin, zone) for span in chosen], orientation="h", name=kind,
                marker={"color": colour, "line": {"width": 0}}, customdata=[span.label for span in chosen],
                hovertemplate="%{y}: %{customdata}<extra></extra>",
            )  # fmt: skip
    figure.update_layout(
        barmode="overlay", height=90 + 16 * max(2, len(rows)), margin={"l": 10, "r": 10, "t": 10, "b": 30},
        paper_bgcolor=PAPER, plot_bgcolor=PAPER, font={"color": INK, "size": 11}, bargap=0.15,
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        xaxis={"type": "date", "gridcolor": GRID},
        yaxis={"autorange": "reversed", "automargin": True, "fixedrange": True, "type": "category",
               "categoryorder": "array", "categoryarray": rows, "dtick": 1},
    )  # fmt: skip
    return figure


def as_html(figure: Figure, name: str, tools: bool = False) -> str:
    """The figure as a piece of a page that already holds plotly's script; `tools`: with buttons to zoom and save."""
    from plotly.io import to_html

    config = {
        "responsive": True,
        "displaylogo": False,
        "displayModeBar": tools,
        "modeBarButtonsToRemove": ["select2d", "lasso2d"],
    }
    return str(to_html(figure, include_plotlyjs=False, full_html=False, div_id=name, config=config))


def script() -> str:
    """Plotly's own script, to be put into the page once: nothing is fetched when the page is opened."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())

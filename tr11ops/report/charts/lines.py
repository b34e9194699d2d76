"""Curves as inline SVG: some panels over one common axis, with incidents marked. Pure.

The drawing is stretched to the page's width; labels are text of the page, so that they keep their
size on a phone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape

from tr11ops.detect.detector import Severity
from tr11ops.report.charts.scale import Scale
from trainer.contract.record import Record

WIDTH, HEIGHT = 1000.0, 100.0  # of a drawing, in its own units
LANES = 5  # rows of names above the first panel
LANE_PIXELS = 16
NAME_WIDTH = 6.2 / 1100  # of a letter, as a share of a desktop's page
LONGEST_NAME = 42
MOST_MARKERS = 200


class Curve(Record):
    """Values over x; None breaks the line, and so does what cannot be shown. `is_dotted`: each
    value is a dot too.
    """

    name: str
    colour: str
    points: Sequence[tuple[float, float] | None]
    is_dotted: bool = False


class Panel(Record):
    """One drawing: curves of one scale. `title` says what the scale shows, with its unit."""

    title: str
    curves: tuple[Curve, ...]
    is_log: bool = False
    from_zero: bool = False


class IncidentMarker(Record):
    """Something that happened at x, drawn through all panels. `end` is None for what is not over."""

    x: float
    end: float | None
    severity: Severity
    name: str


class Readout(Record):
    """What is said of the point under the pointer: its x, and one text each for `names`.

    `label`: which of them is the x. `like`: the chart that has the same names and texts, in the same
    order; they are written there alone.
    """

    names: tuple[str, ...]
    rows: Sequence[tuple[float, tuple[str, ...]]]
    label: int = 0
    like: str = ""


def line_chart(
    key: str,
    panels: Sequence[Panel],
    scale: Scale,
    ticks: Sequence[tuple[float, str]],
    readout: Readout,
    x_title: str,
    markers: Sequence[IncidentMarker] = (),
) -> str:
    """The panels below each other over `scale`, labelled at `ticks`; names of `markers` above them.
    `x_title`: what the common axis shows, with its unit.
    """
    shown = [marker for marker in markers if 0 <= (scale.at(marker.x) or 0.0) <= 1][:MOST_MARKERS]
    parts = [f'<div class="chart lines" id="{escape(key)}">', '<p class="readout">&nbsp;</p>']
    parts += _marker_names(shown, scale)
    parts += [
        text
        for index, panel in enumerate(panels)
        for text in _panel(panel, scale, ticks=ticks, markers=shown, is_first=index == 0)
    ]
    parts += [
        '<div class="axis">',
        *_axis_labels(scale, ticks),
        "</div>",
        axis_title(x_title),
        _data(panels, scale, readout),
        "</div>",
    ]
    return "\n".join(parts)


# ----------------------------------------------------------------------------- one panel
def _panel(
    panel: Panel,
    scale: Scale,
    ticks: Sequence[tuple[float, str]],
    markers: Sequence[IncidentMarker],
    is_first: bool,
) -> Iterator[str]:
    heights = _heights(panel)
    legend = "".join(
        f'<span><i class="swatch {curve.colour}"></i>{escape(curve.name)}</span>'
        for curve in panel.curves
    )
    logarithmic = "; logarithmic" if panel.is_log else ""
    yield f"<h3>{escape(panel.title)}{logarithmic}</h3>"
    if len(panel.curves) > 1:
        yield f'<p class="legend">{legend}</p>'
    yield f'<div class="plot{" first" if is_first else ""}">'
    yield f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none">'
    values = [(value, y) for value in heights.ticks() if (y := _y(heights, value)) is not None]
    columns = [x for moment, _ in ticks if (x := _x(scale, moment)) is not None]
    grid = "".join(
        [f"M0 {y:.1f}H{WIDTH:g}" for _, y in values] + [f"M{x:.1f} 0V{HEIGHT:g}" for x in columns]
    )
    yield f'<path class="grid" d="{grid}"/>'
    yield from _marks(markers, scale)
    for curve in panel.curves:
        path, dots = _path(curve, scale, heights)
        yield f'<path class="line {curve.colour}" d="{path}"/>'
        if curve.is_dotted:
            yield f'<path class="dots {curve.colour}" d="{dots}"/>'
    yield "</svg>"
    yield from (
        f'<span class="y" style="bottom:{HEIGHT - y:.1f}%">{number(value)}</span>'
        for value, y in values
    )
    yield '<div class="cursor"></div><div class="range"></div></div>'


def _heights(panel: Panel) -> Scale:
    values = (point[1] for curve in panel.curves for point in curve.points if point is not None)
    return Scale.over(values, log=panel.is_log, from_zero=panel.from_zero)


def _x(scale: Scale, value: float) -> float | None:
    share = scale.at(value)
    if share is None:
        return None
    return WIDTH * share


def _y(scale: Scale, value: float) -> float | None:
    share = scale.at(value)
    if share is None:
        return None
    return HEIGHT * (1.0 - share)


def _path(curve: Curve, scale: Scale, heights: Scale) -> tuple[str, str]:
    """The line as SVG writes it, broken where data are missing, and a dot for each value."""
    line = []
    dots = []
    is_down = False
    for point in curve.points:
        if point is None:
            x = None
            y = None
        else:
            x = _x(scale, point[0])
            y = _y(heights, point[1])
        if x is None or y is None:
            is_down = False
            continue
        # The first of a stretch draws a line of no length: a single value between two gaps is seen,
        # as a dot.
        line.append(f"L{x:.1f} {y:.1f}" if is_down else f"M{x:.1f} {y:.1f}h0")
        if curve.is_dotted:
            dots.append(f"M{x:.1f} {y:.1f}h0")
        is_down = True
    return "".join(line), "".join(dots)


def number(value: float) -> str:
    """A number of an axis or a readout, in four digits at most."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        digits, _, power = f"{value:.3g}".partition("e")
        if power:
            return f"{digits}e{int(power)}"
        return digits
    return f"{value:.4g}"


# ----------------------------------------------------------------------------- incidents
def _marks(markers: Sequence[IncidentMarker], scale: Scale) -> Iterator[str]:
    for marker in markers:
        x = _x(scale, marker.x) or 0.0
        kind = marker.severity.name.lower()
        if marker.end is None:
            end = None
        else:
            end = _x(scale, marker.end)
        if end is not None and end > x:
            width = min(WIDTH, end) - x
            yield f'<rect class="shade {kind}" x="{x:.1f}" y="0" width="{width:.1f}" height="{HEIGHT:g}"/>'
        yield f'<path class="mark {kind}" d="M{x:.1f} 0V{HEIGHT:g}"><title>{escape(marker.name)}</title></path>'


def _marker_names(markers: Sequence[IncidentMarker], scale: Scale) -> Iterator[str]:
    """Each marker's name in the first lane with room for it; in none there is, its line is there
    and its row in the table.
    """
    ends = [-1.0] * LANES
    texts = []
    for marker in sorted(markers, key=lambda marker: marker.x):
        share = scale.at(marker.x) or 0.0
        if len(marker.name) <= LONGEST_NAME:
            name = marker.name
        else:
            name = f"{marker.name[: LONGEST_NAME - 1]}…"
        width = NAME_WIDTH * (len(name) + 2)
        # near the right edge the name stands to the left of its line
        is_flipped = share + width > 1.0
        if is_flipped:
            begin = share - width
            end = share
        else:
            begin = share
            end = share + width
        lane = next((index for index, used in enumerate(ends) if used <= begin), None)
        if lane is None:
            continue
        ends[lane] = end
        kind = f"{marker.severity.name.lower()}{' flip' if is_flipped else ''}"
        place = f"left:{100 * share:.2f}%;top:{LANE_PIXELS * lane}px"
        texts.append(
            f'<span class="{kind}" data-x="{share:.5f}" style="{place}">{escape(name)}</span>'
        )
    lanes = sum(end >= 0 for end in ends)
    if texts:
        yield f'<div class="markers" style="height:{LANE_PIXELS * lanes}px">{"".join(texts)}</div>'


# ----------------------------------------------------------------------------- the axis, and what
# the script reads
def axis_title(words: str) -> str:
    """What an axis shows, with its unit, below its labels."""
    return f'<p class="axis-title">{escape(words)}</p>'


def _axis_labels(scale: Scale, ticks: Sequence[tuple[float, str]]) -> Iterator[str]:
    for value, label in ticks:
        share = scale.at(value)
        if share is not None and 0.03 <= share <= 0.97:
            yield f'<span style="left:{100 * share:.2f}%">{escape(label)}</span>'


def _data(panels: Sequence[Panel], scale: Scale, readout: Readout) -> str:
    """For the script: where each point stands, what to say of it, and each panel's scale."""
    places = [(scale.at(x), texts) for x, texts in readout.rows]
    value = {
        "names": readout.names,
        "label": readout.label,
        "x": [round(x, 5) for x, _ in places if x is not None],
        "panels": [_panel_data(panel) for panel in panels],
    }
    if readout.like:
        value["like"] = readout.like
    else:
        shown = (texts for x, texts in places if x is not None)
        value["texts"] = [_without_repeats(column) for column in zip(*shown, strict=True)]
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace(
        "<", "\\u003c"
    )
    return f'<script type="application/json">{text}</script>'


def _without_repeats(column: Sequence[str]) -> list[str | int]:
    """The texts of one name; 0 for one that is the same as before it."""
    pairs = zip(column, ("", *column), strict=False)
    return [0 if index and text == before else text for index, (text, before) in enumerate(pairs)]


def _panel_data(panel: Panel) -> dict[str, object]:
    """A panel's scale; where its points stand is read from its lines."""
    heights = _heights(panel)
    low = heights.low
    high = heights.high
    if not (math.isfinite(low) and math.isfinite(high)):
        low = 0.0
        high = 1.0
    return {"low": low, "high": high, "log": heights.is_log}

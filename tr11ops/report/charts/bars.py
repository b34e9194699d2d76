"""Bars: parts of a whole, and what a node did when. Plain HTML and SVG, stretched to the page's
width. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import tzinfo
from html import escape

from tr11ops.report.charts.lines import axis_title
from tr11ops.report.charts.scale import Scale, time_ticks, time_title
from trainer.contract.record import Record

WIDTH = 1000.0
MERGE = 0.5  # a gap of less, in a drawing's thousandths, is not seen


class BarRow(Record):
    """One bar: its name, its parts as (class of the colour, length, what it is), and a text behind
    it.
    """

    name: str
    parts: tuple[tuple[str, float, str], ...]
    text: str = ""


class TimeSpan(Record):
    """A stretch of time of one row, a node's or a job's; `kind` is the class of its colour, `label`
    says why.
    """

    row: str
    begin: float
    end: float
    kind: str
    label: str


def bars(key: str, rows: Sequence[BarRow]) -> str:
    """One bar a row, all to one scale, which begins at zero."""
    longest = max((sum(length for _, length, _ in row.parts) for row in rows), default=0.0) or 1.0
    parts = [f'<div class="chart bars" id="{escape(key)}">']
    for row in rows:
        pieces = "".join(
            f'<i class="{kind}" style="width:{100 * length / longest:.2f}%" title="{escape(what)}"></i>'
            for kind, length, what in row.parts
            if length > 0
        )
        parts.append(_line(row.name, f'<span class="bar">{pieces}</span>', row.text))
    return "\n".join([*parts, "</div>"])


def timeline(
    key: str,
    spans: Sequence[TimeSpan],
    colours: Mapping[str, str],
    zone: tzinfo,
    is_each: bool = False,
) -> str:
    """One line a row: when it did what. `colours`: class of each kind and its meaning, the later
    ones on top. `is_each`: each stretch stands by itself, with its own label, also where the next
    one follows at once.
    """
    low = min(span.begin for span in spans)
    high = max(span.end for span in spans)
    scale = Scale(low, max(high, low + 1.0))
    by_row: dict[str, list[TimeSpan]] = {}
    for span in spans:
        by_row.setdefault(span.row, []).append(span)
    legend = "".join(
        f'<span><i class="swatch {kind}"></i>{escape(name)}</span>'
        for kind, name in colours.items()
    )
    parts = [f'<p class="legend">{legend}</p>', f'<div class="chart bars" id="{escape(key)}">']
    for name, own in by_row.items():
        own.sort(key=_begin)
        if is_each:
            paths = "".join(_path(span.kind, [span], scale) for span in own)
        else:
            paths = "".join(
                _path(kind, [span for span in own if span.kind == kind], scale) for kind in colours
            )
        drawing = (
            f'<svg viewBox="0 0 {WIDTH:g} 10" preserveAspectRatio="none" role="img">{paths}</svg>'
        )
        parts.append(_line(name, drawing, ""))
    labels = "".join(
        f'<span style="left:{100 * share:.2f}%">{escape(label)}</span>'
        for moment, label in time_ticks(scale.low, scale.high, zone)
        if (share := scale.at(moment)) is not None and 0.05 <= share <= 0.95
    )
    parts.append(_line("", f'<div class="axis">{labels}</div>', ""))
    parts.append(_line("", axis_title(time_title(zone)), ""))
    return "\n".join([*parts, "</div>"])


def _begin(span: TimeSpan) -> float:
    return span.begin


def _line(name: str, drawing: str, text: str) -> str:
    return f'<span class="name">{escape(name)}</span>{drawing}<span>{escape(text)}</span>'


def _path(kind: str, spans: Sequence[TimeSpan], scale: Scale) -> str:
    """The spans of one kind as one path; what follows without a gap that is seen is one stretch."""
    if not spans:
        return ""
    text = "".join(
        f"M{begin:.1f} 5h{max(0.6, end - begin):.1f}" for begin, end in _merged(spans, scale)
    )
    title = "; ".join(dict.fromkeys(span.label for span in spans[-3:]))
    return f'<path class="{kind}" d="{text}"><title>{escape(title)}</title></path>'


def _merged(spans: Sequence[TimeSpan], scale: Scale) -> Iterator[tuple[float, float]]:
    begin = end = -2.0
    for span in spans:
        first = WIDTH * (scale.at(span.begin) or 0.0)
        last = WIDTH * (scale.at(span.end) or 0.0)
        if first - end > MERGE:
            if end > -1.0:
                yield begin, end
            begin = first
            end = last
        end = max(end, last)
    if end > -1.0:
        yield begin, end

"""The course of the training over time, with its incidents, and the loss against tokens. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import tzinfo
from itertools import pairwise

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import MINUTE, quantity, timestamp
from tr11ops.detect.detector import Severity
from tr11ops.report.charts.lines import Curve, IncidentMarker, Panel, Readout, line_chart, number
from tr11ops.report.charts.scale import Scale, time_ticks, time_title
from tr11ops.report.material import ReportMaterial
from tr11ops.report.page import ReportSection
from tr11ops.report.series import LayersPoint, StepPoint, TrainingSeries, ValidationPoint

GAP_FACTOR = 5  # iterations that took so many times the usual time break the line
GROUP_COLOURS = ("orange", "purple", "green", "grey")
PANELS = (  # title, field of a point, colour, logarithmic, from zero
    ("learning rate", "learning_rate", "green", False, True),
    ("global batch (samples)", "batch", "orange", False, True),
    ("throughput (TFLOPs per GPU)", "tflops", "blue", False, False),
    ("gradient norm", "grad_norm", "grey", True, False),
)
LAYER_PANELS = (  # title, field of a point
    ("gradient norm of a layer", "gradient"),
    ("a layer's update over its weights (ratio)", "update"),
    ("what a block hands on, root mean square", "output"),
)
LOSS = "loss (nats)"
OVER_TIME = "course-chart"  # the first one: others may show its texts
NAMES = ("", "iteration", "tokens", "loss", "learning rate", "batch", "TFLOPs", "gradient norm")


def course(material: ReportMaterial, zone: tzinfo, with_charts: bool) -> ReportSection:
    """The whole course, over time and over tokens."""
    series = material.series
    title = " ".join(filter(None, ("Course of the training", str(material.within))))
    if isinstance(series, Unknown):
        return ReportSection("course", title, empty=f"cannot be read: {series.why}")
    if not series.points:
        where = "yet" if material.within.is_whole else "there"
        return ReportSection("course", title, empty=f"no step is logged {where}")
    markers = incident_markers(material)
    lines = [f"{series.total:,} steps; dotted lines are incidents, shaded until they were over."]
    if len(series.points) < series.total:
        lines.append(f"{len(series.points):,} of them are drawn, with every stretch's extremes.")
    untold = [title for title, name, *_ in PANELS if not _is_told(series, name)]
    if with_charts and untold:
        lines.append(f"Not drawn, for no step tells it: {', '.join(untold)}.")
    charts: tuple[str, ...] = ()
    if with_charts:
        from_zero = material.within.is_whole
        charts = (
            _over_time(series, markers, zone),
            *_over_tokens(series, zone, from_zero),
            *_layers_over_time(series, markers, zone),
        )
    return ReportSection("course", title, tuple(lines), charts)


def incident_markers(material: ReportMaterial) -> list[IncidentMarker]:
    """Faults that stopped the training, and alerts of some weight; the most severe first."""
    faults = [
        IncidentMarker(fault.time, fault.recovered, Severity.CRITICAL, f"stopped: {fault.words}")
        for fault in material.goodput.faults
    ]
    alerts = [
        IncidentMarker(incident.lasted_from, incident.lasted_to, incident.severity, incident.title)
        for incident in known(material.incidents, ())
        if incident.severity > Severity.INFO
    ]
    return sorted([*faults, *alerts], key=lambda marker: -marker.severity.rank)


# ----------------------------------------------------------------------------- the two charts
def _over_time(series: TrainingSeries, markers: Sequence[IncidentMarker], zone: tzinfo) -> str:
    points = with_gaps(series.points)
    scale = Scale.over(point.time for point in series.points)
    loss = Panel(
        LOSS,
        (_curve("training", "blue", "loss", points), *_validations(series, "time")),
        is_log=True,
    )
    others = [
        Panel(title, (_curve(title, colour, name, points),), log, zero)
        for title, name, colour, log, zero in PANELS
        if _is_told(series, name)
    ]
    rows = [(point.time, _texts(point, zone)) for point in series.points]
    ticks = time_ticks(scale.low, scale.high, zone)
    return line_chart(
        OVER_TIME,
        [loss, *others],
        scale=scale,
        ticks=ticks,
        readout=Readout(NAMES, rows),
        x_title=time_title(zone),
        markers=markers,
    )


def _over_tokens(series: TrainingSeries, zone: tzinfo, from_zero: bool) -> Iterator[str]:
    told = [point for point in series.points if point.tokens is not None]
    if not any(point.tokens for point in told):
        return
    loss = [
        None if point is None else (float(point.tokens or 0), point.loss)
        for point in with_gaps(told, by_time=False)
    ]
    scale = Scale.over((float(point.tokens or 0) for point in told), from_zero=from_zero)
    panel = Panel(
        f"{LOSS} against tokens",
        (Curve("training", "blue", loss), *_validations(series, "tokens")),
        is_log=True,
    )
    rows = [(float(point.tokens or 0), _texts(point, zone)) for point in told]
    like = ""
    if len(told) == len(series.points):
        like = OVER_TIME
    ticks = [(value, quantity(value)) for value in scale.ticks(6)]
    readout = Readout(NAMES, rows, label=NAMES.index("tokens"), like=like)
    yield line_chart(
        "tokens-chart",
        [panel],
        scale=scale,
        ticks=ticks,
        readout=readout,
        x_title="tokens seen",
    )


def _layers_over_time(
    series: TrainingSeries, markers: Sequence[IncidentMarker], zone: tzinfo
) -> Iterator[str]:
    """Of what was measured of the layers: the largest, whose layer the pointer reads, and the
    middle one.
    """
    points = series.layers
    if not points:
        return
    scale = Scale.over(point.time for point in points)
    panels = [
        Panel(
            title,
            tuple(
                Curve(
                    name,
                    colour,
                    [(point.time, getattr(getattr(point, field), name)) for point in points],
                )
                for name, colour in (("largest", "orange"), ("middle", "grey"))
            ),
            is_log=True,
        )
        for title, field in LAYER_PANELS
    ]
    rows = [(point.time, _layer_texts(point, zone)) for point in points]
    ticks = time_ticks(scale.low, scale.high, zone)
    names = ("", "iteration", *(title for title, _ in LAYER_PANELS))
    yield line_chart(
        "layers-chart",
        panels,
        scale=scale,
        ticks=ticks,
        readout=Readout(names, rows),
        x_title=time_title(zone),
        markers=markers,
    )


def _layer_texts(point: LayersPoint, zone: tzinfo) -> tuple[str, ...]:
    spreads = [getattr(point, field) for _, field in LAYER_PANELS]
    texts = (f"{number(each.largest)} in {each.layer}" if each.layer else "-" for each in spreads)
    return timestamp(point.time, zone, MINUTE), f"{point.iteration:,}", *texts


def _is_told(series: TrainingSeries, name: str) -> bool:
    """Whether any point has a number of this name, so that there is something to draw."""
    return any(math.isfinite(_value(point, name)) for point in series.points)


def _curve(title: str, colour: str, name: str, points: Sequence[StepPoint | None]) -> Curve:
    return Curve(
        title,
        colour,
        [None if point is None else (point.time, _value(point, name)) for point in points],
    )


def _value(point: StepPoint, name: str) -> float:
    """NaN, of which nothing is drawn, for what is not told."""
    value: float | None = getattr(point, name)
    if value is None:
        return math.nan
    return value


def _validations(series: TrainingSeries, x: str) -> Iterator[Curve]:
    groups: dict[str, list[ValidationPoint]] = {}
    for point in series.validations:
        groups.setdefault(point.group, []).append(point)
    for index, (group, points) in enumerate(groups.items()):
        places: list[tuple[float, float] | None] = []
        for before, point in zip([None, *points[:-1]], points, strict=True):
            if before is not None and point.iteration <= before.iteration:
                places.append(None)  # it was evaluated again after a resume
            place = getattr(point, x)
            if place is not None:
                places.append((float(place), point.loss))
        name = f"validation {group}".strip()
        yield Curve(name, GROUP_COLOURS[index % len(GROUP_COLOURS)], places, is_dotted=True)


def _texts(point: StepPoint, zone: tzinfo) -> tuple[str, ...]:
    when = timestamp(point.time, zone, MINUTE)
    values = (point.loss, point.learning_rate, point.batch, point.tflops, point.grad_norm)
    numbers = (_text(value, number) for value in values)
    return when, f"{point.iteration:,}", _text(point.tokens, quantity), *numbers


def _text(value: float | None, words: Callable[[float], str]) -> str:
    """A dash for what is not known."""
    if value is None or not math.isfinite(value):
        return "-"
    return words(value)


def with_gaps(points: Sequence[StepPoint], by_time: bool = True) -> list[StepPoint | None]:
    """The points with None where the training stood still or went back, so that no line is drawn
    across that.

    It stood still where an iteration took `GAP_FACTOR` times the median of all, and a minute or
    more in all; without `by_time` that is no gap.
    """
    paces = sorted(_pace(first, second) for first, second in pairwise(points))
    if paces:
        slowest = GAP_FACTOR * paces[len(paces) // 2]
    else:
        slowest = math.inf
    result: list[StepPoint | None] = list(points[:1])
    for first, second in pairwise(points):
        still = by_time and second.time - first.time > 60.0 and _pace(first, second) > slowest
        if still or second.iteration < first.iteration:
            result.append(None)
        result.append(second)
    return result


def _pace(first: StepPoint, second: StepPoint) -> float:
    """Seconds an iteration took from one point to the next."""
    return (second.time - first.time) / max(1, second.iteration - first.iteration)

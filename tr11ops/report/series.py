"""The course of a whole training for drawing: every step read, few kept, and no spike lost among
them; and what it measured of its layers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tr11ops.curves.curve import WHOLE, CurveRange
from trainer.contract.metrics_record import (
    LAYER_NUMBERS,
    LAYERS,
    STEP,
    VALIDATION,
    MetricsRecord,
    records,
)
from trainer.contract.record import Record

# What a training measured of its layers, for drawing: of each number the layer that has most of
# it, and the middle.

MOST_LAYER_POINTS = 500


class LayerSpread(Record):
    """One number over all layers: the largest, in which layer, and the middle one; NaN where none
    was measured.
    """

    largest: float
    layer: str
    middle: float


class LayersPoint(Record):
    """One measured step. `update`: over the layer's weights, both Euclidean norms."""

    time: float
    iteration: int
    tokens: int | None
    samples: int | None
    gradient: LayerSpread
    update: LayerSpread
    output: LayerSpread


def layers_point(
    record: MetricsRecord, tokens: int | None, samples: int | None
) -> LayersPoint | None:
    """Of a record of that kind, which stands behind the step with so many tokens and samples; None
    of any other.
    """
    names = record.values.get("layers")
    if (
        record.kind != LAYERS
        or not isinstance(names, list)
        or record.iteration is None
        or record.time is None
    ):
        return None
    layers = [str(name) for name in names]
    numbers = {name: _numbers(record.values.get(name), len(layers)) for name in LAYER_NUMBERS}
    relative = [
        moved / weight if weight > 0 else math.nan
        for moved, weight in zip(numbers["update"], numbers["weight"], strict=True)
    ]
    return LayersPoint(
        record.time,
        record.iteration,
        tokens=tokens,
        samples=samples,
        gradient=_spread(layers, numbers["gradient"]),
        update=_spread(layers, relative),
        output=_spread(layers, numbers["output"]),
    )


def _numbers(value: Any, count: int) -> list[float]:
    """A list of so many numbers; NaN for what is none."""
    given = value if isinstance(value, list) else []
    found = [
        float(each) if isinstance(each, int | float) and not isinstance(each, bool) else math.nan
        for each in given[:count]
    ]
    return found + [math.nan] * (count - len(found))


def _spread(layers: Sequence[str], values: Sequence[float]) -> LayerSpread:
    finite = [
        (value, layer) for layer, value in zip(layers, values, strict=True) if math.isfinite(value)
    ]
    if not finite:
        return LayerSpread(math.nan, "", math.nan)
    largest, layer = max(finite, key=lambda pair: pair[0])
    return LayerSpread(largest, layer, median(value for value, _ in finite))


def few_of(points: Iterable[LayersPoint]) -> tuple[LayersPoint, ...]:
    """At most MOST_LAYER_POINTS of them: of each stretch the one with the largest update."""
    every = list(points)
    width = max(1, -(-len(every) // MOST_LAYER_POINTS))
    stretches = (every[begin : begin + width] for begin in range(0, len(every), width))
    return tuple(max(stretch, key=_update_of) for stretch in stretches)


def _update_of(point: LayersPoint) -> float:
    largest = point.update.largest
    if math.isfinite(largest):
        return largest
    return -math.inf


MOST_POINTS = 2000
MOST_VALIDATIONS = 300  # of a group


class StepPoint(Record):
    """One logged step. `time` in seconds since the epoch; a loss or norm that was not finite is
    NaN, a count that is not told None.
    """

    time: float
    iteration: int
    tokens: int | None
    loss: float
    learning_rate: float
    batch: int | None
    tflops: float
    grad_norm: float
    job_id: str
    samples: int | None = None


class ValidationPoint(Record):
    """One evaluation of a validation group; `tokens` and `samples` are those of the step before it,
    `time` is when it was logged.
    """

    group: str
    time: float
    iteration: int
    tokens: int | None
    loss: float
    samples: int | None = None


Point = StepPoint | ValidationPoint | LayersPoint


@dataclass
class JobThroughput:
    """When the steps of one job were logged, the TFLOPs of a GPU in each, and its global batch: 24
    bytes a step.
    """

    times: array[float] = field(default_factory=lambda: array("d"))
    tflops: array[float] = field(default_factory=lambda: array("d"))
    batches: array[float] = field(default_factory=lambda: array("d"))


class TrainingSeries(Record):
    """Steps in the order in which they were trained. `total` counts all, `points` are those that
    were kept.
    """

    points: tuple[StepPoint, ...]
    total: int
    validations: tuple[ValidationPoint, ...] = ()
    throughput: Mapping[str, JobThroughput] = {}
    layers: tuple[LayersPoint, ...] = ()


def read_series(path: Path, within: CurveRange = WHOLE) -> TrainingSeries:
    """The steps in a metrics.jsonl `within` a range, thinned to at most MOST_POINTS or so, and
    their validations.

    What each job's throughput was is kept of all steps.

    Raises OSError as the file system does, but no file is an empty series.
    """
    return series_of(points_of(records(path)), within)


def series_of(found: Iterable[Point], within: CurveRange = WHOLE) -> TrainingSeries:
    """The whole series, in one pass."""
    validations: dict[str, list[ValidationPoint]] = {}
    throughput: dict[str, JobThroughput] = {}
    layers: list[LayersPoint] = []

    def steps() -> Iterator[StepPoint]:
        for record in found:
            inside = within.has(record.iteration, record.samples, record.tokens)
            if isinstance(record, ValidationPoint):
                if inside:
                    validations.setdefault(record.group, []).append(record)
                continue
            if isinstance(record, LayersPoint):
                if inside:
                    layers.append(record)
                continue
            if math.isfinite(record.tflops):
                job = throughput.setdefault(record.job_id, JobThroughput())
                job.times.append(record.time)
                job.tflops.append(record.tflops)
                job.batches.append(record.batch or 0)
            if inside:
                yield record

    points, total = thinned(steps(), MOST_POINTS)
    kept = [
        point
        for group in validations.values()
        for point in group[:: -(-len(group) // MOST_VALIDATIONS)]
    ]
    return TrainingSeries(
        points, total, validations=tuple(kept), throughput=throughput, layers=few_of(layers)
    )


def points_of(found: Iterable[MetricsRecord]) -> Iterator[Point]:
    """Steps, validations and measures of layers among records that say when they were written."""
    tokens: int | None = None
    samples: int | None = None
    for record in found:
        iteration = record.iteration
        number = record.number
        if iteration is None or record.time is None:
            continue
        if record.kind == STEP:
            tokens = record.integer("consumed_tokens")
            samples = record.integer("consumed_samples")
            yield StepPoint(
                record.time,
                iteration,
                tokens=tokens,
                loss=number("lm_loss"),
                learning_rate=number("learning_rate"),
                batch=record.integer("global_batch_size"),
                tflops=number("tflops"),
                grad_norm=number("grad_norm"),
                job_id=record.job_id,
                samples=samples,
            )
        elif record.kind == VALIDATION:
            group = str(record.values.get("name", ""))
            yield ValidationPoint(
                group,
                record.time,
                iteration=iteration,
                tokens=tokens,
                loss=number("lm_loss"),
                samples=samples,
            )
        elif (measured := layers_point(record, tokens, samples)) is not None:
            yield measured


def thinned(points: Iterable[StepPoint], most: int) -> tuple[tuple[StepPoint, ...], int]:
    """Few of the points, and how many there were: the ends and the extremes of stretches of equally
    many steps.

    The stretches double whenever there are too many, so one pass over a stream of unknown length is
    enough.
    """
    per_stretch = 7  # points that stand for a stretch
    limit = max(1, most // per_stretch)
    stretches: list[list[StepPoint]] = []
    width = 1
    total = 0
    for point in points:
        if total % width == 0:
            if len(stretches) == 2 * limit:
                stretches = [
                    first + second
                    for first, second in zip(stretches[::2], stretches[1::2], strict=True)
                ]
                stretches = [_extremes(stretch) for stretch in stretches]
                width *= 2
            stretches.append([])
        stretches[-1].append(point)
        total += 1
        if len(stretches[-1]) >= 4 * per_stretch:
            stretches[-1] = _extremes(stretches[-1])
    kept = [
        point
        for stretch in stretches
        for point in (_extremes(stretch) if total > most else stretch)
    ]
    return tuple(kept), total


def _extremes(stretch: list[StepPoint]) -> list[StepPoint]:
    """The first and last step of a stretch, those of extreme loss, norm and throughput, and one
    that was not finite.
    """
    chosen = {0, len(stretch) - 1}
    for name, choices in (("loss", (max, min)), ("grad_norm", (max,)), ("tflops", (min,))):
        finite = [(getattr(point, name), index) for index, point in enumerate(stretch)]
        finite = [(value, index) for value, index in finite if math.isfinite(value)]
        chosen |= {choose(finite)[1] for choose in choices if finite}
    chosen |= set(
        [index for index, point in enumerate(stretch) if not math.isfinite(point.loss)][:1]
    )
    return [stretch[index] for index in sorted(chosen)]

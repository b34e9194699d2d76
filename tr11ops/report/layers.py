"""What a training measured of its layers, for drawing: of each number the layer that has most of
it, and the middle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from trainer.contract.metrics_record import LAYER_NUMBERS, LAYERS, MetricsRecord
from trainer.contract.record import Record

MOST_LAYER_POINTS = 1000


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
    tokens: int
    samples: int
    gradient: LayerSpread
    update: LayerSpread
    output: LayerSpread


def layers_point(record: MetricsRecord, tokens: int, samples: int) -> LayersPoint | None:
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
        tokens,
        samples,
        _spread(layers, numbers["gradient"]),
        _spread(layers, relative),
        _spread(layers, numbers["output"]),
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

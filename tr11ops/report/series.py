"""The course of a whole training for drawing: every step read, few kept, and no spike lost among them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.state_file import open_for_reading

MOST_POINTS = 2000


@dataclass(frozen=True)
class Point:
    """One logged step. `time` in seconds since the epoch; a loss or norm that was not finite is NaN."""

    time: float
    iteration: int
    tokens: int
    loss: float
    learning_rate: float
    batch: int
    tflops: float
    grad_norm: float
    job_id: str


@dataclass(frozen=True)
class Series:
    """Steps in the order in which they were trained. `total` counts all, `points` are those that were kept."""

    points: tuple[Point, ...]
    total: int


def read_series(path: Path, most: int = MOST_POINTS) -> Series:
    """The steps in a metrics.jsonl, thinned to at most `most` or so. Memory does not grow with the file.

    Lines that are no step, or are torn, are passed over. Raises OSError as the file system does, but no file is an
    empty series.
    """
    try:
        with open_for_reading(path) as stream:
            return thinned(points_of(stream), most)
    except FileNotFoundError:
        return Series((), 0)


def points_of(lines: Iterable[bytes]) -> Iterator[Point]:
    """The steps in lines of JSON."""
    for line in lines:
        if b'"step"' not in line:
            continue
        try:
            value = json.loads(line)
            if value.get("kind") != "step":
                continue
            yield Point(
                float(value["time"]),
                int(value["iteration"]),
                int(value.get("consumed_tokens") or 0),
                _number(value.get("lm_loss")),
                _number(value.get("learning_rate")),
                int(value.get("global_batch_size") or 0),
                _number(value.get("tflops")),
                _number(value.get("grad_norm")),
                str(value.get("job_id", "")),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def thinned(points: Iterable[Point], most: int) -> Series:
    """In stretches of equally many steps: the first, and those with extreme loss, norm or throughput of each.

    The stretches double whenever there are too many, so one pass over a stream of unknown length is enough.
    """
    per_stretch = 7  # points that tell of a stretch
    limit = max(1, most // per_stretch)
    stretches: list[list[Point]] = []
    width, total = 1, 0
    for point in points:
        if total % width == 0:
            if len(stretches) == 2 * limit:
                stretches = [first + second for first, second in zip(stretches[::2], stretches[1::2], strict=True)]
                stretches = [_telling(stretch) for stretch in stretches]
                width *= 2
            stretches.append([])
        stretches[-1].append(point)
        total += 1
        if len(stretches[-1]) >= 4 * per_stretch:
            stretches[-1] = _telling(stretches[-1])
    kept = [point for stretch in stretches for point in (_telling(stretch) if total > most else stretch)]
    return Series(tuple(kept), total)


def _telling(stretch: list[Point]) -> list[Point]:
    """The first and last step of a stretch, those of extreme loss, norm and throughput, and one that was not finite."""
    chosen = {0, len(stretch) - 1}
    for name, choices in (("loss", (max, min)), ("grad_norm", (max,)), ("tflops", (min,))):
        finite = [(getattr(point, name), index) for index, point in enumerate(stretch)]
        finite = [(value, index) for value, index in finite if math.isfinite(value)]
        chosen |= {choose(finite)[1] for choose in choices if finite}
    chosen |= set([index for index, point in enumerate(stretch) if not math.isfinite(point.loss)][:1])
    return [stretch[index] for index in sorted(chosen)]

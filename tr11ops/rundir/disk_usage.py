"""How full the watched file systems were: the samples that `tr11 fs-watchdog` keeps, and when one
will be full.

    state/filesystems/usage.jsonl     one object per look and file system

A sample is appended in one write. Now and then the file is thinned (hourly for a week, daily for a
quarter) and replaced whole; a sample that another host appends in that very moment may be lost, the
next look brings another.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

from tr11ops.base.observed import Observed, Unknown
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document, record_of_text
from trainer.contract.files import append_line, write_atomically
from trainer.contract.record import Amount, Record
from trainer.contract.state_file import read_bytes

HOUR_SECONDS = 3600.0
DAY_SECONDS = 86400.0
WINDOW_DAYS = 14.0  # of the samples that a forecast looks at
LEAST_SAMPLES = 3
LEAST_SPAN_SECONDS = 12 * HOUR_SECONDS
MOST_FORECAST_DAYS = 3650.0
HOURLY_DAYS = 7.0
DAILY_DAYS = 90.0
THIN_ABOVE_BYTES = 512 << 10
MOST_SAMPLES = 240  # in one forecast: pairs grow with the square

Kind = Literal["bytes", "inodes"]
KINDS: tuple[Kind, ...] = ("bytes", "inodes")


class Usage(Record):
    """One look at one file system. Counts are None where the source does not say.

    `bytes_share` and `inodes_share` are used/limit (1.0 is full), from sources that know only
    those. `bytes_free` is what can still be written; on a shared file system that is less than
    limit - used.
    """

    time: Amount
    name: str
    source: str
    path: str = ""
    bytes_used: Amount | None = None
    bytes_limit: Amount | None = None
    inodes_used: Amount | None = None
    inodes_limit: Amount | None = None
    bytes_free: Amount | None = None
    bytes_share: Amount | None = None
    inodes_share: Amount | None = None

    def counts(self, kind: Kind) -> tuple[float | None, float | None]:
        """Used, and the limit."""
        if kind == "bytes":
            return (self.bytes_used, self.bytes_limit)
        return (self.inodes_used, self.inodes_limit)

    def percent(self, kind: Kind) -> float | None:
        """How full it is in percent of its limit; None where that is not known."""
        used, limit = self.counts(kind)
        if used is not None and limit:
            return 100.0 * used / limit
        share = self.bytes_share if kind == "bytes" else self.inodes_share
        if share is None:
            return None
        return 100.0 * share


class Forecast(Record):
    """When a file system will be full, of what (bytes or inodes), and how that was judged.

    `full_at`: seconds since the epoch at the trend of the last days; None when it does not grow or
    is not known. `not_before`: the same at the pace between deletions; set only where deletions
    come again and again. `per_day`: growth in percent points of the limit. `why` says why there is
    no day.
    """

    kind: Kind | None = None
    full_at: float | None = None
    not_before: float | None = None
    per_day: float | None = None
    why: str = ""


# ----------------------------------------------------------------------------- the samples
def usage_path(directory: RunDirectory) -> Path:
    return directory.paths.state / "filesystems" / "usage.jsonl"


def read_usage(directory: RunDirectory) -> Observed[tuple[Usage, ...]]:
    """All samples by time; empty when no one has looked yet. A line that was cut or is garbage is
    left out.
    """
    path = usage_path(directory)
    try:
        lines = read_bytes(path).split(b"\n")
    except FileNotFoundError:
        return ()
    except OSError as error:
        return Unknown(f"{path}: {error.strerror or error}")
    written = [line for line in lines if line.strip()]
    found = [sample for sample in map(_sample, written) if sample is not None]
    if written and not found:
        return Unknown(f"{path} holds no sample that can be read")
    return tuple(sorted(found, key=lambda sample: sample.time))


def append_usage(directory: RunDirectory, samples: Sequence[Usage], now: float) -> None:
    """Keep these samples, and thin the file when it has grown. Raises OSError as the file system
    does.
    """
    if not samples:
        return
    path = usage_path(directory)
    append_line(path, "\n".join(map(_line, samples)))
    status = path.stat()
    if status.st_uid == os.geteuid():
        path.chmod(0o664)
    if status.st_size > THIN_ABOVE_BYTES:
        kept = read_usage(directory)
        if not isinstance(kept, Unknown):
            write_atomically(path, "".join(_line(sample) + "\n" for sample in thinned(kept, now)))


def thinned(samples: Iterable[Usage], now: float) -> tuple[Usage, ...]:
    """The newest sample of each hour for a week, of each day for a quarter, of each file system; in
    order of time.
    """
    kept: dict[tuple[str, int, int], Usage] = {}
    for sample in sorted(samples, key=lambda sample: sample.time):
        age = now - sample.time
        if age <= DAILY_DAYS * DAY_SECONDS:
            step = HOUR_SECONDS if age <= HOURLY_DAYS * DAY_SECONDS else DAY_SECONDS
            kept[(sample.name, int(step), int(sample.time // step))] = sample
    return tuple(sorted(kept.values(), key=lambda sample: sample.time))


def newest(samples: Iterable[Usage]) -> dict[str, Usage]:
    """The last sample of each file system, by name."""
    return {sample.name: sample for sample in sorted(samples, key=lambda sample: sample.time)}


def _line(sample: Usage) -> str:
    return json.dumps({key: item for key, item in document(sample).items() if item is not None})


def _sample(line: bytes) -> Usage | None:
    """One line as a sample; None when it is not one."""
    try:
        return record_of_text(Usage, line)
    except ValueError:
        return None


# ----------------------------------------------------------------------------- when it will be full
def forecast(samples: Iterable[Usage], now: float) -> Forecast:
    """When one file system will be full, from its last samples (WINDOW_DAYS): of bytes or of
    inodes, what comes first.

    The trend is the median of the slopes between all pairs of samples (Theil-Sen), so a few odd
    samples do not count. Where something was deleted, the pace between deletions says before which
    day it cannot be full.
    """
    window = sorted(
        (sample for sample in samples if now - WINDOW_DAYS * DAY_SECONDS <= sample.time <= now),
        key=lambda sample: sample.time,
    )
    found = [_forecast(kind, window) for kind in KINDS]
    return min(found, key=lambda one: (one.full_at or math.inf, one.not_before or math.inf))


def _forecast(kind: Kind, window: Sequence[Usage]) -> Forecast:
    points = _points(kind, window)
    if len(points) < LEAST_SAMPLES or points[-1][0] - points[0][0] < LEAST_SPAN_SECONDS:
        return Forecast(kind, why="too few samples yet")
    last_time, last = points[-1]
    steps = _deletions(points)
    growth = _slope(points, steps)
    # One deletion was someone's; several are a habit, and then the trend over all of them counts.
    if len(steps) < 2:
        net = growth
    else:
        net = _slope(points, ())
    if net is None or growth is None:
        return Forecast(kind, why="too few samples yet")
    per_day = net * DAY_SECONDS
    if last >= 100.0:
        return Forecast(kind, full_at=last_time, per_day=per_day)
    recent = [point for point in points if point[0] >= last_time - (last_time - points[0][0]) / 3]
    pace = None
    if len(recent) >= LEAST_SAMPLES:
        pace = _slope(recent, steps)
    if growth <= 0:
        return Forecast(kind, per_day=per_day, why="it does not grow")
    if pace is not None and pace < 0.1 * growth:
        return Forecast(kind, per_day=per_day, why="growth has stopped")
    not_before = None
    if len(steps) >= 2:
        not_before = _day(last_time, last, max(growth, net))
    return Forecast(
        kind,
        _day(last_time, last, net),
        not_before=not_before,
        per_day=per_day,
        why="" if net > 0 else "what grows is deleted again",
    )


def _points(kind: Kind, window: Sequence[Usage]) -> list[tuple[float, float]]:
    """(time, percent of today's limit), at most MOST_SAMPLES of them, the last one always among
    them.
    """
    if not window:
        return []
    _, limit = window[-1].counts(kind)
    found = []
    for sample in window:
        used, _ = sample.counts(kind)
        level = 100.0 * used / limit if used is not None and limit else sample.percent(kind)
        if level is not None:
            found.append((sample.time, level))
    stride = -(-len(found) // MOST_SAMPLES)
    if stride > 1:
        return found[::-1][::stride][::-1]
    return found


def _deletions(points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """The times of the samples before which something large was deleted: a fall beyond what the
    rest wavers by.
    """
    differences = [after[1] - before[1] for before, after in pairwise(points)]
    usual = median(abs(difference) for difference in differences)
    least = max(1.0, 3.0 * usual)  # percent points
    return tuple(
        after[0]
        for (_, after), difference in zip(pairwise(points), differences, strict=True)
        if difference < -least
    )


def _slope(points: Sequence[tuple[float, float]], steps: Sequence[float]) -> float | None:
    """Median slope, percent points a second, of all pairs of samples between which there is none of
    the `steps`.
    """
    segments: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        segments.setdefault(sum(step <= point[0] for step in steps), []).append(point)
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for segment in segments.values()
        for number, earlier in enumerate(segment)
        for later in segment[number + 1 :]
        if later[0] > earlier[0]
    ]
    if slopes:
        return median(slopes)
    return None


def _day(last_time: float, last: float, slope: float) -> float | None:
    if slope <= 0:
        return None
    seconds = (100.0 - last) / slope
    if seconds <= MOST_FORECAST_DAYS * DAY_SECONDS:
        return last_time + seconds
    return None

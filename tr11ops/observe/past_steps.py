"""How far the training was at a moment: found in metrics.jsonl by halving, for the log of weeks is
long.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from trainer.contract.metrics_record import MetricsRecord, parse_record
from trainer.contract.record import Record
from trainer.contract.state_file import descriptor_of


class PastProgress(Record):
    """How far the training was: the last step before a moment. `loss` is None where it was not a
    number.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    loss: float | None


WINDOW_BYTES = 64 << 10  # holds many records, and validation records between them


def progress_at(path: Path, moment: float) -> PastProgress | None:
    """The last step that was logged before `moment` (seconds since the epoch); None where there is
    none.

    Records are in the order of their times. Raises OSError as the file system does; no file is no
    step.
    """
    try:
        descriptor = descriptor_of(path)
    except FileNotFoundError:
        return None
    try:
        low, high = 0, os.fstat(descriptor).st_size
        while high - low > WINDOW_BYTES:
            middle = (low + high) // 2
            first = next(iter(_steps(descriptor, middle, high)), None)
            if first is not None and _time(first) < moment:
                low = middle
            else:
                high = middle
        # a window's first line may be cut, so it begins a window early
        found = _steps(descriptor, max(0, low - WINDOW_BYTES), high + WINDOW_BYTES)
    finally:
        os.close(descriptor)
    before = [step for step in found if _time(step) < moment]
    if before:
        return _standing(before[-1])
    return None


def _steps(descriptor: int, start: int, end: int) -> list[MetricsRecord]:
    """The whole step records of a stretch of the file that say when they were written."""
    size = min(end - start, 4 * WINDOW_BYTES)
    lines = os.pread(descriptor, size, start).split(b"\n")[0 if start == 0 else 1 : -1]
    found = [record for line in lines if (record := parse_record(line)) is not None]
    return [record for record in found if record.is_step and record.time is not None]


def _time(step: MetricsRecord) -> float:
    return step.time or 0.0


def _standing(step: MetricsRecord) -> PastProgress:
    loss = step.number("lm_loss")
    return PastProgress(
        iteration=step.iteration or 0,
        consumed_samples=step.integer("consumed_samples") or 0,
        consumed_tokens=step.integer("consumed_tokens") or 0,
        loss=None if math.isnan(loss) else loss,
    )

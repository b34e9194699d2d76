"""How far the training was at a moment: found in metrics.jsonl by halving, for the log of weeks is long."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from tr11ops.report.handover import Standing
from trainer.state_file import descriptor_of

WINDOW_BYTES = 64 << 10  # holds many records, and validation records between them


def standing_at(path: Path, moment: float) -> Standing | None:
    """The last step that was logged before `moment` (seconds since the epoch); None where there is none.

    Records are in the order of their times. Raises OSError as the file system does; no file is no step.
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
            if first is not None and first["time"] < moment:
                low = middle
            else:
                high = middle
        # a window's first line may be cut, so it begins a window early
        found = [
            step
            for step in _steps(descriptor, max(0, low - WINDOW_BYTES), high + WINDOW_BYTES)
            if step["time"] < moment
        ]
    finally:
        os.close(descriptor)
    return _standing(found[-1]) if found else None


def _steps(descriptor: int, start: int, end: int) -> list[dict[str, Any]]:
    """The whole step records of a stretch of the file."""
    size = min(end - start, 4 * WINDOW_BYTES)
    lines = os.pread(descriptor, size, start).split(b"\n")[0 if start == 0 else 1 : -1]
    return [step for line in lines if (step := _step(line)) is not None]


def _step(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
        is_step = isinstance(value, dict) and value.get("kind", "step") == "step"
        return value if is_step and math.isfinite(value["time"]) and int(value["iteration"]) >= 0 else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _standing(step: dict[str, Any]) -> Standing:
    loss = step.get("lm_loss")
    is_number = isinstance(loss, int | float) and math.isfinite(loss)
    return Standing(
        iteration=int(step["iteration"]),
        consumed_samples=_count(step.get("consumed_samples")),
        consumed_tokens=_count(step.get("consumed_tokens")),
        loss=float(loss) if is_number and loss is not None else None,
    )


def _count(value: object) -> int:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0

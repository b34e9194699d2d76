"""Numbers as people read them: durations, sizes, counts."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime


def duration(seconds: float) -> str:
    """Two units at most: `42 s`, `3 min 20 s`, `5 h 07 min`, `12 d 3 h`."""
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 and whole < 600 else "")
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(count: float) -> str:
    """Bytes in binary units: `327.8 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGTP]?)(i?)B")


def bytes_of(text: str) -> int:
    """Bytes of a size as a run card writes it: `400 TiB` in powers of 1024, `1.5TB` in powers of 1000, `512B`.

    Raises ValueError for anything else.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text[:40]!r} is not a size, e.g. 400 TiB or 1.5TB")
    factor: int = (1024 if match[3] else 1000) ** " KMGTP".index(match[2] or " ")
    return round(float(match[1]) * factor)


def quantity(count: float) -> str:
    """A large count in three or four digits: `950`, `12.3 k`, `47.8 M`, `97.8 B`."""
    if count < 10_000:
        return f"{count:.0f}"
    for unit in ("k", "M", "B"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} T"


def finite(value: float) -> float | None:
    """The number where JSON can hold it; None for infinities and what is no number."""
    return value if math.isfinite(value) else None


def iso_time(moment: float | None) -> str | None:
    """ISO 8601 in UTC, to the second; None for a time that is not known or that no calendar holds."""
    if moment is None:
        return None
    try:
        return datetime.fromtimestamp(moment, tz=UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None

"""Points and lengths of time as people type them, for every option that takes one."""

from __future__ import annotations

import datetime
import re

_SPAN = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?(s|m|min|h|d|w)?", re.IGNORECASE)
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604_800}
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?")


def span_seconds(text: str, unit: str | None = "s") -> float:
    """Seconds of `90s`, `30m` or `30min`, `2h`, `1.5d`, `2w`; a bare number is in `unit` (None: it
    is refused).

    Raises ValueError.
    """
    match = _SPAN.fullmatch(text.strip())
    if match is None or not (match[2] or unit):
        raise ValueError("is no length of time; write 90s, 30m, 2h or 1d")
    return float(match[1]) * _UNITS[(match[2] or unit or "s").lower()]


def since(text: str, now: float) -> float:
    """Seconds since the epoch for `2h`, `3d ago`, `14:30`, `2022-05-01`, `2022-05-01 14:30`, ISO
    with a zone.

    Times without a zone are of this machine; a clock time is the last such moment before `now`.
    Raises ValueError.
    """
    words = text.strip()
    try:
        return now - span_seconds(words.removesuffix(" ago"), None)
    except ValueError:
        pass
    try:
        if clock := _CLOCK.fullmatch(words):
            today = datetime.datetime.fromtimestamp(now)
            then = today.replace(
                hour=int(clock[1]), minute=int(clock[2]), second=int(clock[3] or 0), microsecond=0
            )
            return (then if then <= today else then - datetime.timedelta(days=1)).timestamp()
        return datetime.datetime.fromisoformat(words).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            "is no time; write 12h, 90min, 3d, 14:30, 2022-05-01 or 2022-05-01T14:30"
        ) from None

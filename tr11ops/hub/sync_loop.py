"""Synchronising on and on: through days without the hub, and until a signal ends it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tr11ops.evidence import cause
from tr11ops.hub.base import HubAway, HubError
from tr11ops.hub.sync import Busy
from tr11ops.hub.sync_round import Outcome
from tr11ops.units import duration

FIRST_PAUSE_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 3600.0
SHORTEST_INTERVAL_SECONDS = 60.0
LONGEST_INTERVAL_SECONDS = 30 * 86400.0
_SPAN = re.compile(r"(\d{1,9})(?:\s*(s|min|m|h|d))?")
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Clock:
    """`steady` never goes back; `wait` returns true when it is time to end; `chance` gives 0..1."""

    steady: Callable[[], float]
    wait: Callable[[float], bool]
    chance: Callable[[], float]


def seconds_of(text: str) -> float:
    """`90s`, `30m`, `1h`, `2d`; a bare number is in minutes. Raises ValueError."""
    match = _SPAN.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2] or "min"] if match else 0.0
    if not SHORTEST_INTERVAL_SECONDS <= seconds <= LONGEST_INTERVAL_SECONDS:
        raise ValueError("write it as 30m, 1h or 1d; at least 1 minute, at most 30 days")
    return seconds


def follow(
    round_: Callable[[], Outcome],
    interval: float,
    clock: Clock,
    show: Callable[[Outcome], None],
    say: Callable[[str], None],
) -> None:
    """A round each `interval` seconds, counted from its beginning, until `clock.wait` says that it is enough.

    What fails is said once, and that it works again; meanwhile it is tried with growing pauses, as the hub asks.
    """
    trouble, since, pause = "", 0.0, FIRST_PAUSE_SECONDS
    while True:
        begin = clock.steady()
        try:
            outcome = round_()
        except (HubError, Busy, OSError) as error:
            text = f"it runs already: {error}" if isinstance(error, Busy) else cause(error)
            since = since if trouble else begin
            if text != trouble:
                say(f"{text}; trying on")
            trouble = text
            asked = error.wait if isinstance(error, HubAway) else 0.0
            delay = max(asked, min(pause, interval) * (0.75 + 0.5 * clock.chance()))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        else:
            if trouble:
                say(f"it works again, after {duration(begin - since)}")
            trouble, pause = "", FIRST_PAUSE_SECONDS
            show(outcome)
            delay = max(0.0, interval - (clock.steady() - begin))
        if clock.wait(delay):
            return

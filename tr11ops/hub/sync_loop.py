"""Synchronising on and on: through days without the hub, and until a signal ends it."""

from __future__ import annotations

import math
from collections.abc import Callable

from tr11ops.base.errors import Busy, HubError, HubUnavailable
from tr11ops.base.moments import span_seconds
from tr11ops.base.observed import cause
from tr11ops.base.retry import RetryPolicy
from tr11ops.base.units import duration
from tr11ops.hub.sync_round import SyncOutcome
from trainer.contract.record import Record

FIRST_PAUSE_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 3600.0
SHORTEST_INTERVAL_SECONDS = 60.0
LONGEST_INTERVAL_SECONDS = 30 * 86400.0


class LoopClock(Record):
    """`steady` never goes back; `wait` returns true when it is time to end; `chance` gives 0..1."""

    steady: Callable[[], float]
    wait: Callable[[float], bool]
    chance: Callable[[], float]


def seconds_of(text: str) -> float:
    """`90s`, `30m`, `1h`, `2d`; a bare number is in minutes. Raises ValueError."""
    try:
        seconds = span_seconds(text, "m")
    except ValueError:
        seconds = 0.0
    if not SHORTEST_INTERVAL_SECONDS <= seconds <= LONGEST_INTERVAL_SECONDS:
        raise ValueError("write it as 30m, 1h or 1d; at least 1 minute, at most 30 days")
    return seconds


def follow(
    round_: Callable[[], SyncOutcome],
    interval: float,
    clock: LoopClock,
    show: Callable[[SyncOutcome], None],
    say: Callable[[str], None],
) -> None:
    """A round each `interval` seconds, counted from its beginning, until `clock.wait` says that it
    is enough.

    What fails is said once, and that it works again; meanwhile it is tried with growing pauses, as
    the hub asks.
    """
    trouble, since, failures = "", 0.0, 0
    retries = RetryPolicy(
        first_seconds=FIRST_PAUSE_SECONDS,
        longest_seconds=min(LONGEST_PAUSE_SECONDS, interval),
        jitter=(0.75, 1.25),
        longest_asked_seconds=math.inf,
        chance=clock.chance,
    )
    while True:
        begin = clock.steady()
        try:
            outcome = round_()
        except (HubError, Busy, OSError) as error:
            if isinstance(error, Busy):
                text = f"it runs already: {error}"
            else:
                text = cause(error)
            since = since if trouble else begin
            if text != trouble:
                say(f"{text}; trying on")
            trouble = text
            asked = error.wait if isinstance(error, HubUnavailable) else 0.0
            failures += 1
            delay = retries.delay(failures, asked)
        else:
            if trouble:
                say(f"it works again, after {duration(begin - since)}")
            trouble, failures = "", 0
            show(outcome)
            delay = max(0.0, interval - (clock.steady() - begin))
        if clock.wait(delay):
            return

"""What time it is for tr11's own records and decisions: the machine's clock, or that of a replay, which
lets months pass in seconds (`tr11ops.replay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _ProcessClock:
    """The clock of this process, for all of its threads. `other` is None where it is the machine's."""

    other: Callable[[], float] | None = None


def now() -> float:
    """Seconds since the epoch."""
    if _ProcessClock.other is None:
        return time.time()
    return _ProcessClock.other()


def monotonic() -> float:
    """Seconds of a clock that no one sets, to tell how long something takes."""
    if _ProcessClock.other is None:
        return time.monotonic()
    return _ProcessClock.other()


@contextmanager
def another_clock(clock: Callable[[], float]) -> Iterator[None]:
    """Let `clock` say what time it is, in all threads of this process; after it, the machine's again."""
    _ProcessClock.other = clock
    try:
        yield
    finally:
        _ProcessClock.other = None

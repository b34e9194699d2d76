"""A bandwidth limit that many threads share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_SECONDS = 0.25  # of the rate, that may go at once after a pause


class RateLimiter:
    """A token bucket: in any time, at most rate x (time + BURST_SECONDS) bytes pass, and one piece.

    `bytes_per_second` 0: no limit. Measures with a monotonic clock, so a clock that is set changes nothing.
    """

    def __init__(
        self,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._due = clock() - BURST_SECONDS  # when all that was taken so far would be through at the rate

    def take(self, count: int) -> None:
        """Wait until `count` bytes may go. Threads go in the order in which they ask."""
        if not self.bytes_per_second or not count:
            return
        with self._lock:
            now = self._clock()
            begin = max(self._due, now - BURST_SECONDS)
            self._due = begin + count / self.bytes_per_second
            wait = begin - now
        if wait > 0:
            self._sleep(wait)

"""Signals that ask a command to stop: obeyed within a block, and as they were before it after it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def obeying(obey: Callable[[int], None], numbers: tuple[signal.Signals, ...] = STOP_SIGNALS) -> Iterator[None]:
    """Call `obey` with the number of each signal that comes; a second may come while the first is obeyed."""
    before = {number: signal.signal(number, lambda received, _frame: obey(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

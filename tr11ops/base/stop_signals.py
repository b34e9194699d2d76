"""Signals that ask a command to stop: obeyed within a block, and as they were before it after it."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopEvent(threading.Event):
    """An event that a signal handler may set, also while this very thread is inside `wait`.

    `threading.Event` takes a lock to be set and another time to be waited for: a handler that sets
    it in the middle of a wait waits for its own thread, for ever. `queue.SimpleQueue.put` is
    documented as safe there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._was_set = False
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._was_set

    def set(self) -> None:
        self._was_set = True
        self._woken.put(None)

    def obey(self, _number: int) -> None:
        """What `obeying` calls with a signal's number, where any of them only sets the event."""
        self.set()

    def clear(self) -> None:
        """A stop is not taken back. Raises NotImplementedError."""
        raise NotImplementedError("a stop is not taken back")

    def wait(self, timeout: float | None = None) -> bool:
        if not self._was_set:
            with suppress(queue.Empty):
                self._woken.get(timeout=None if timeout is None else max(0.0, timeout))
                self._woken.put(None)  # for the others that wait
        return self._was_set


@contextmanager
def obeying(
    obey: Callable[[int], None], numbers: tuple[signal.Signals, ...] = STOP_SIGNALS
) -> Iterator[None]:
    """Call `obey` with the number of each signal that comes; a second may come while the first is
    obeyed.
    """
    before = {
        number: signal.signal(number, lambda received, _frame: obey(received)) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

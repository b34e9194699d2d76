"""Each rank's own seconds in forward, backward and optimizer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed import Work

_own = threading.local()
_uncounted = Work.wait


def waited_seconds() -> float:
    """Seconds that this thread has waited since `count_waits`."""
    return getattr(_own, "seconds", 0.0)


@wraps(_uncounted)
def _counted(*arguments: Any, **options: Any) -> Any:
    began = time.perf_counter()
    try:
        return _uncounted(*arguments, **options)
    finally:
        _own.seconds = waited_seconds() + time.perf_counter() - began


def count_waits() -> None:
    """From now on every wait of this process is counted, once."""
    Work.wait = _counted  # type: ignore[method-assign]


_Span = tuple[str, Any, Any]  # a part of a step, its begin and its end


class ComputeClock:
    """Seconds of this rank in forward, backward and optimizer. What the pipeline waits for lies
    between, uncounted.

    On a GPU by events on its stream, read in `take` alone: waits for the tensor ranks count, for
    all of them alike. On a CPU by the clock, less what this thread waits for other ranks: a worker
    whose processor is slow, taken by others or stopped shows it.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        if not self._on_gpu:
            count_waits()
        self._spans: list[_Span] = []
        self._steps: list[list[_Span]] = []
        self._open: dict[str, Any] = {}
        self._is_in_step = False
        self._processor_at = 0.0
        self._processor: list[float] = []

    def begin(self, part: str) -> None:
        if self._is_in_step:
            self._open[part] = self._now()

    def end(self, part: str) -> None:
        if self._is_in_step:
            self._spans.append((part, self._open.pop(part), self._now()))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted."""

        def counted(*arguments: Any, **options: Any) -> Any:
            self.begin(part)
            try:
                return function(*arguments, **options)
            finally:
                self.end(part)

        return counted

    def begin_step(self) -> None:
        """Count from here on. Outside of a step, as in an evaluation, nothing is."""
        self._is_in_step, self._spans = True, []
        self._processor_at = time.process_time()

    def end_step(self) -> None:
        """What was counted since `begin_step` is one step's."""
        self._is_in_step = False
        self._steps.append(self._spans)
        self._processor.append(time.process_time() - self._processor_at)

    def take(self) -> list[dict[str, float]]:
        """Seconds by part, of each step that has ended since the last call. On a GPU it waits for
        the last of them.
        """
        steps, self._steps = self._steps, []
        last = next((spans[-1] for spans in reversed(steps) if spans), None)
        if self._on_gpu and last is not None:
            last[2].synchronize()
        return [self._seconds_of(spans) for spans in steps]

    def take_processor(self) -> list[float]:
        """Seconds that processors worked for this process, of each step that has ended since the
        last call.
        """
        worked, self._processor = self._processor, []
        return worked

    def _seconds_of(self, spans: list[_Span]) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for part, began, ended in spans:
            if self._on_gpu:
                took = began.elapsed_time(ended) / 1000
            else:
                took = ended - began
            seconds[part] = seconds.get(part, 0.0) + took
        return seconds

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter() - waited_seconds()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

"""Logs made for tests: steps with noise between them, restarts that go back; and a reader that
counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from tests.tr11ops.status_cases import record
from trainer.contract.metrics_record import format_step


@dataclass
class CountingReader:
    """Bytes in memory; counts the calls and the bytes that were read."""

    data: bytes
    calls: int = 0
    amount: int = 0

    def read(self, offset: int, length: int) -> bytes:
        found = self.data[offset : offset + length]
        self.calls += 1
        self.amount += len(found)
        return found


def step_line(iteration: int) -> bytes:
    return f"[default7]:{format_step(record(iteration))}\n".encode()


def log_of(iterations: Iterable[int], noise: bytes = b"") -> bytes:
    return b"".join(step_line(iteration) + noise for iteration in iterations)


class EndlessLog:
    """A log of any size that is made up as it is read: 8 KiB for each step, of which most is noise.

    Every 5000 steps there is a restart that goes back by 100, and the watchdog's line with the
    time.
    """

    STEP_BYTES, STEPS, BACK = 8192, 5000, 100
    START = 1_650_000_000.0
    _HEAD, _TAIL = (
        b"[default7]: iteration %8d",
        step_line(1)[len("[default7]: iteration        1") :],
    )
    _NOISE = b"[default3]: something that a worker prints now and then, of no use to anyone\n" * 110

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = 0
        self.amount = 0

    def iteration(self, number: int) -> int:
        return number - self.BACK * (number // self.STEPS) + 1

    def time(self, number: int) -> float:
        return self.START + 3600 * (number // self.STEPS)

    def _step(self, number: int) -> bytes:
        head = self._HEAD % self.iteration(number) + self._TAIL
        if number % self.STEPS == 0:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time(number)))
            head = f"[{stamp}] PULSE: running\n".encode() + head
        return head + self._NOISE[: self.STEP_BYTES - 1 - len(head)] + b"\n"

    def read(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self.size - offset))
        first, last = offset // self.STEP_BYTES, (offset + length) // self.STEP_BYTES
        data = b"".join(self._step(number) for number in range(first, last + 1))
        self.calls += 1
        self.amount += length
        return data[offset - first * self.STEP_BYTES :][:length]

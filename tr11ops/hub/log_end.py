"""What the end of a training's log proves by itself. Pure: bytes in, values out."""

from __future__ import annotations

import math
from statistics import median

from tr11ops.base.robust import usual_step_seconds
from tr11ops.dialects.reading import step_record
from tr11ops.logs.lines import STAMP_BYTES
from trainer.contract.metrics_record import MeasuredStep
from trainer.contract.record import Record

RECENT_STEPS = 20  # of the throughput
STEPS_SHOWN = 100


class LogEnd(Record):
    """The last steps of a log of `size` bytes, oldest first, and the last time stamp in it, as it
    stands there.

    The stamp has no zone: it is of the machine that wrote it.
    """

    size: int
    steps: tuple[MeasuredStep, ...] = ()
    stamp: str = ""

    @property
    def last(self) -> MeasuredStep | None:
        if self.steps:
            return self.steps[-1]
        return None

    @property
    def order(self) -> tuple[str, int]:
        """The greater, the later the log ends; for logs of one cluster."""
        return self.stamp, self.last.iteration if self.last is not None else -1

    @property
    def seconds_per_iteration(self) -> float | None:
        """The usual time of a recent step, as `tr11 status` has it beside the run; None where no
        line tells.
        """
        return usual_step_seconds(step.seconds_per_iteration for step in self.steps)

    @property
    def tflops(self) -> float | None:
        """The median of the recent steps, per worker; None where no line tells."""
        told = [step.tflops for step in self.steps[-RECENT_STEPS:]]
        sound = [value for value in told if math.isfinite(value) and value > 0]
        if sound:
            return median(sound)
        return None

    @property
    def remaining_seconds(self) -> float | None:
        """What is left at the recent pace, without waits and restarts; None where the pace or the
        last step is not told. Larger batches to come are in no log.
        """
        pace = self.seconds_per_iteration
        if self.last is None or pace is None or self.last.total_iterations is None:
            return None
        return max(0, self.last.total_iterations - self.last.iteration) * pace

    @property
    def is_finished(self) -> bool:
        """Whether the last step that was logged is the training's last one."""
        if self.last is None or self.last.total_iterations is None:
            return False
        return 0 < self.last.total_iterations <= self.last.iteration


def end_of_log(data: bytes, size: int, is_whole: bool) -> LogEnd:
    """What the last bytes of a log say. A line that the beginning or the end cuts is left out;
    `is_whole`: they are the whole log.
    """
    lines = data.split(b"\n")[0 if is_whole else 1 : -1]
    steps = [step for line in lines if b"iteration" in line and (step := _step(line)) is not None]
    stamps = STAMP_BYTES.findall(b"\n".join(lines))
    return LogEnd(
        size, tuple(steps[-STEPS_SHOWN:]), stamps[-1].decode().replace("T", " ") if stamps else ""
    )


def _step(line: bytes) -> MeasuredStep | None:
    try:
        return step_record(line.decode("utf-8", "replace"))
    except (ValueError, OverflowError):  # numbers that no training has
        return None

"""Each rank's own compute time, in a small file of the attempt: which rank is slow, and not only that all are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from trainer.contract import RunPaths, host_name, write_json
from trainer.lifecycle import Attempt, tell

EVERY_SECONDS = 30.0


class ComputeRecord:
    """Sums the seconds of steps, and replaces `state/attempts/JOB/compute/rank-R.json` every half minute.

    It holds the mean seconds of a step in each part, over the `steps` up to `iteration`.
    """

    def __init__(self, paths: RunPaths, attempt: Attempt, rank: int, clock: Callable[[], float] = time.monotonic):
        self._path, self._launch, self._rank = paths.compute(attempt.job_id, rank), attempt.launch, rank
        self._clock, self._next = clock, clock()  # the first step is told at once
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._complained = False

    def add(self, iteration: int, seconds: Mapping[str, float]) -> None:
        """Count a step. A file system that refuses the file is said once."""
        self._steps += 1
        for part, took in seconds.items():
            self._sums[part] = self._sums.get(part, 0.0) + took
        now = self._clock()
        if now < self._next:
            return
        self._next = now + EVERY_SECONDS
        mean = {part: round(total / self._steps, 6) for part, total in sorted(self._sums.items())}
        value = {"rank": self._rank, "host": host_name(), "launch": self._launch, "time": time.time()}
        try:
            write_json(self._path, {**value, "iteration": iteration, "steps": self._steps, "seconds": mean})
        except OSError as error:
            if not self._complained:
                tell(f"tr11: compute times cannot be written: {error}")
            self._complained = True
        self._sums, self._steps = {}, 0

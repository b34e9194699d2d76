"""Each rank's own compute time, in a small file of the attempt: which rank is slow, and not only
that all are.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trainer.contract.attempt import AttemptIdentity, tell
from trainer.contract.documents import document, read_record
from trainer.contract.files import host_name, write_unflushed
from trainer.contract.paths import RunPaths
from trainer.contract.record import Finite, Record

EVERY_STEPS = 10
MIN_STEPS = (
    5  # to be judged by: fewer may be the first ones, in which kernels are chosen and compiled
)
RECENT_STEPS = 20
FIRST_STEPS = 10  # of a launch: in them kernels are chosen and compiled
USUAL_STEPS = 40  # after those: what is usual on this rank
WINDOWS = 60  # of EVERY_STEPS, whose medians are kept
LARGEST_BYTES = 16 << 10


class RankPosition(Record):
    """Where a rank stands: its pipeline stage, and its part of the layers there. Ranks of one place
    do equal work.
    """

    stage: int
    part: int

    @classmethod
    def of(cls, rank: int, world_size: int, tensor: int, pipeline: int) -> RankPosition:
        """By the degrees; the order of ranks is that of `trainer.parallel.mesh`."""
        return cls(rank // (world_size // pipeline), rank % tensor)


class ComputeTimes(Record):
    """A rank's mean seconds of a step in each part, over the `steps` up to `iteration`, waiting
    excluded.

    `longest`: seconds of the longest of these steps, in all parts. `stage` and `part`: see
    `RankPosition`. `processor`: mean seconds of a step that processors worked for this rank's
    process, all its threads; far below `seconds` on a CPU where others use it too, or the process
    is stopped. The four are None in a file of an earlier version. `recent`: seconds of each of the
    last steps, 20 at most, in all parts, oldest first; empty in a file of an earlier version.
    `usual`: median seconds of steps 11 to 50 of the launch, in all parts; None before, and in a
    file of an earlier version. `windows`: median seconds of a step in each of the last whole tens
    of steps, 60 at most, oldest first; empty in a file of an earlier version.
    """

    rank: int
    host: str
    launch: int
    time: Finite
    iteration: int
    steps: int
    seconds: Mapping[str, Finite]
    longest: Finite | None = None
    stage: int | None = None
    part: int | None = None
    processor: Finite | None = None
    recent: tuple[Finite, ...] = ()
    usual: Finite | None = None
    windows: tuple[Finite, ...] = ()

    @classmethod
    def read(cls, path: Path) -> ComputeTimes | None:
        """What `path` holds, None when absent. Raises ValueError when it is malformed, OSError."""
        return read_record(cls, path, "a record of compute times", largest=LARGEST_BYTES)

    @property
    def can_be_judged(self) -> bool:
        """Whether it is of enough steps."""
        return self.steps >= MIN_STEPS

    @property
    def total(self) -> float:
        """Mean seconds of a step in all parts."""
        return math.fsum(self.seconds.values())

    @property
    def without_longest(self) -> float:
        """The same of all steps but the longest one: a single hiccup is no slowness."""
        if self.longest is None or self.steps < 2:
            return self.total
        return (self.total * self.steps - self.longest) / (self.steps - 1)


@dataclass
class ComputeRecord:
    """Replaces `state/attempts/JOB/compute/rank-R.json` after the first step and every 10
    iterations, with the mean of the last 10 steps, and each of the last 20. No clock decides when:
    records of one iteration are of the same steps on all ranks.
    """

    paths: RunPaths
    attempt: AttemptIdentity
    rank: int
    position: RankPosition

    def __post_init__(self) -> None:
        self._path = self.paths.compute(self.attempt.job_id, self.rank)
        self._host = host_name()
        self._steps: deque[Mapping[str, float]] = deque(maxlen=EVERY_STEPS)
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._windows: deque[float] = deque(maxlen=WINDOWS)
        self._processor: deque[float] = deque(maxlen=EVERY_STEPS)
        self._skipped, self._early = 0, list[float]()
        self._is_first = True
        self._complained = False

    def forget(self) -> None:
        """Leave out a step that was traced, and all before it: what follows is compared with its
        like alone.
        """
        self._steps.clear()
        self._recent.clear()
        self._windows.clear()
        self._processor.clear()

    def is_due(self, iteration: int) -> bool:
        """Whether the record is written after this iteration."""
        return self._is_first or iteration % EVERY_STEPS == 0

    def add(
        self, iteration: int, *steps: Mapping[str, float], processor: Iterable[float] = ()
    ) -> None:
        """Count the steps up to `iteration`. A file system that refuses the file is said once.

        `processor`: seconds that processors worked for this process, of each step, where that is
        known.
        """
        self._steps.extend(steps)
        self._recent.extend(round(math.fsum(step.values()), 6) for step in steps)
        self._processor.extend(processor)
        for step in steps:
            if self._skipped < FIRST_STEPS:
                self._skipped += 1
            elif len(self._early) < USUAL_STEPS:
                self._early.append(math.fsum(step.values()))
        if not self.is_due(iteration):
            return
        self._is_first = False
        if len(self._steps) == EVERY_STEPS:
            self._windows.append(round(median(math.fsum(step.values()) for step in self._steps), 6))
        parts = sorted({part for step in self._steps for part in step})
        count = len(self._steps)
        mean = {
            part: round(math.fsum(step.get(part, 0.0) for step in self._steps) / count, 6)
            for part in parts
        }
        longest = round(max(math.fsum(step.values()) for step in self._steps), 6)
        position, worked = self.position, self._processor
        found = ComputeTimes(
            self.rank,
            self._host,
            launch=self.attempt.launch,
            time=time.time(),
            iteration=iteration,
            steps=count,
            seconds=mean,
            longest=longest,
            stage=position.stage,
            part=position.part,
            processor=round(math.fsum(worked) / len(worked), 6) if worked else None,
            recent=tuple(self._recent),
            usual=round(median(self._early), 6) if len(self._early) == USUAL_STEPS else None,
            windows=tuple(self._windows),
        )
        try:
            write_unflushed(self._path, document(found), os.getpid())
        except OSError as error:
            if not self._complained:
                tell(f"tr11: compute times cannot be written: {error}")
            self._complained = True

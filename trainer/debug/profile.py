"""A look into a training that runs: a trace of some steps, on request, and each rank's own time in
its parts.

A profile that fails is said and answered; it never ends a training.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.contract.attempt import AttemptIdentity, tell
from trainer.contract.files import make_shared
from trainer.contract.paths import RunPaths
from trainer.contract.requests import MOST_PROFILED_STEPS, Request, RequestAnswer, leave_answer
from trainer.contract.units import size

LARGEST_TRACE = 512 << 20  # bytes before it is packed: no viewer opens more
MEMORY_EVENTS = 100_000


@dataclass
class StepProfiler:
    """Profiles steps of this rank when asked. `start` and `after_step` are called on every rank;
    neither is collective.

    `place`: this worker's rank and the number of workers.
    """

    paths: RunPaths
    attempt: AttemptIdentity
    place: tuple[int, int]
    device: torch.device
    _ask: Request | None = None
    _profiler: Any = None
    _first: int = 0
    _left: int = 0

    def start(self, ask: Request, iteration: int) -> None:
        """Profile the steps after `iteration`; refused, with an answer, while another profile is
        under way.
        """
        rank, workers = self.place
        why = "another profile is under way" if self._left else ""
        if not 0 <= ask.rank < workers:
            why = why or f"there are {workers} ranks"
        if not 0 < ask.steps <= MOST_PROFILED_STEPS:
            why = why or f"a profile has 1 to {MOST_PROFILED_STEPS} steps"
        if why:
            if rank == 0:
                self._answer(ask, None, f"nothing was profiled: {why}")
            return
        if rank == 0:
            tell(
                f"tr11: profiling iterations {iteration + 1} to {iteration + ask.steps} of rank {ask.rank}"
            )
        self._ask, self._first, self._left = ask, iteration + 1, ask.steps
        if rank == ask.rank:
            self._guarded(self._begin)

    @property
    def is_tracing(self) -> bool:
        """Whether this rank's steps are traced now, and thereby slower."""
        return self._profiler is not None

    def after_step(self, iteration: int) -> None:
        """Count a step; after the last one write what was seen, and answer."""
        if not self._left:
            return
        self._left -= 1
        if self._left == 0 and self._profiler is not None:
            self._guarded(partial(self._finish, iteration))
            self._profiler = None

    def give_up(self) -> None:
        """No step comes any more: answer who still waits for a profile."""
        ask, self._left, self._profiler = self._ask if self._left else None, 0, None
        if ask is not None and self.place[0] == ask.rank:
            self._answer(
                ask,
                None,
                "nothing was profiled: the training ended before the last step that was asked for",
            )

    def _begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def _finish(self, iteration: int) -> None:
        self._profiler.stop()
        ask, rank = self._ask, self.place[0]
        assert ask is not None
        folder = self.paths.profiles(self.attempt.job_id)
        make_shared(folder)
        stem = f"launch-{self.attempt.launch}-iterations-{self._first}-{iteration}-rank-{rank}"
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / f"{stem}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        with tempfile.TemporaryDirectory() as scratch:
            plain = Path(scratch) / "trace.json"
            self._profiler.export_chrome_trace(str(plain))
            written = plain.stat().st_size
            if written > LARGEST_TRACE:
                text = f"the trace has {size(written)}, more than {size(LARGEST_TRACE)}: ask for fewer steps"
                self._answer(ask, None, text)
                return
            place = folder / f"{stem}.trace.json.gz"
            partial = place.with_name(f".{place.name}.partial")
            with plain.open("rb") as source, gzip.open(partial, "wb", compresslevel=5) as packed:
                shutil.copyfileobj(source, packed, 1 << 20)
            partial.replace(place)
        self._answer(ask, iteration, f"{place} ({size(place.stat().st_size)})")

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever the profiler or the disk says, the training goes on
            if self._ask is not None:
                self._answer(
                    self._ask, None, f"the profile failed: {type(error).__name__}: {error}"
                )

    def _answer(self, ask: Request, step: int | None, text: str) -> None:
        tell(f"tr11: profile: {text}")
        leave_answer(
            self.paths,
            RequestAnswer(ask.id, step, text, time=time.time(), job_id=self.attempt.job_id),
        )

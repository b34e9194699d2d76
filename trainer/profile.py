"""A look into a training that runs: a trace of some steps, on request, and each rank's own time in its parts.

A profile that fails is said and answered; it never ends a training.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.contract import RunPaths, write_json
from trainer.lifecycle import Attempt, tell
from trainer.requests import MOST_PROFILED_STEPS, Answer, ProfileAsk

LARGEST_TRACE = 512 << 20  # bytes before it is packed: no viewer opens more
MEMORY_EVENTS = 100_000


@dataclass
class StepProfiler:
    """Profiles steps of this rank when asked. `start` and `after_step` are called on every rank; neither is collective.

    `place`: this worker's rank and the number of workers.
    """

    paths: RunPaths
    attempt: Attempt
    place: tuple[int, int]
    device: torch.device
    _ask: ProfileAsk | None = None
    _profiler: Any = None
    _first: int = 0
    _left: int = 0

    def start(self, ask: ProfileAsk, iteration: int) -> None:
        """Profile the steps after `iteration`; refused, with an answer, while another profile is under way."""
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
            tell(f"tr11: profiling iterations {iteration + 1} to {iteration + ask.steps} of rank {ask.rank}")
        self._ask, self._first, self._left = ask, iteration + 1, ask.steps
        if rank == ask.rank:
            self._guarded(self._begin)

    def after_step(self, iteration: int) -> None:
        """Count a step; after the last one write what was seen, and answer."""
        if not self._left:
            return
        self._left -= 1
        if self._left == 0 and self._profiler is not None:
            self._guarded(lambda: self._finish(iteration))
            self._profiler = None

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
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"launch-{self.attempt.launch}-iterations-{self._first}-{iteration}-rank-{rank}"
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / f"{stem}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        with tempfile.TemporaryDirectory() as scratch:
            plain = Path(scratch) / "trace.json"
            self._profiler.export_chrome_trace(str(plain))
            size = plain.stat().st_size
            if size > LARGEST_TRACE:
                text = f"the trace has {size >> 20} MiB, more than {LARGEST_TRACE >> 20}: ask for fewer steps"
                self._answer(ask, None, text)
                return
            place = folder / f"{stem}.trace.json.gz"
            partial = place.with_name(f".{place.name}.partial")
            with plain.open("rb") as source, gzip.open(partial, "wb", compresslevel=5) as packed:
                shutil.copyfileobj(source, packed, 1 << 20)
            partial.replace(place)
        self._answer(ask, iteration, f"{place} ({place.stat().st_size / 1e6:.1f} MB)")

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever the profiler or the disk says, the training goes on
            if self._ask is not None:
                self._answer(self._ask, None, f"the profile failed: {type(error).__name__}: {error}")

    def _answer(self, ask: ProfileAsk, step: int | None, text: str) -> None:
        tell(f"tr11: profile: {text}")
        try:
            write_json(self.paths.answer(ask.id), asdict(Answer(ask.id, step, text, time.time(), self.attempt.job_id)))
        except OSError as error:
            tell(f"tr11: the answer to a request could not be written: {error}")


class ComputeClock:
    """Seconds of this rank in forward, backward and optimizer. What the pipeline waits for lies between, uncounted.

    On a GPU by events on its stream, read once all is done. On a CPU by the thread's own processor time, which stands
    still while it waits for tensor ranks; on a GPU such waits count, for all of a node's tensor ranks alike.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        self._open: dict[str, Any] = {}

    def begin(self, part: str) -> None:
        self._open[part] = self._now()

    def end(self, part: str) -> None:
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

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call. On a GPU it waits for the last of them."""
        spans, self._spans = self._spans, []
        if self._on_gpu and spans:
            spans[-1][2].synchronize()
        seconds: dict[str, float] = {}
        for part, began, ended in spans:
            took = began.elapsed_time(ended) / 1000 if self._on_gpu else ended - began
            seconds[part] = seconds.get(part, 0.0) + took
        return seconds

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

"""A replay that leaves the whole record of a run: besides what the controller writes, the phases and
steps that its simulated workers would have logged. So a record exists whose every cause is known.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from tr11ops.cluster.base import Job
from tr11ops.goodput.account import Goodput, account
from tr11ops.goodput.history import read_history
from tr11ops.goodput.history_values import History
from tr11ops.replay.parameters import Layout, Parameters
from tr11ops.replay.production import Production
from tr11ops.replay.traces import Window
from tr11ops.replay.world import PlayedLaunch, Score, WindowOver, World
from tr11ops.rundir.attempts import LaunchRecord
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import PhaseWriter
from trainer.contract.files import write_json
from trainer.contract.state_file import read_json


class RecordingWorld(World):
    """Keeps how each launch went, the one too that runs when the window is over."""

    def __init__(self, window: Window, layout: Layout, times: Parameters) -> None:
        super().__init__(window, layout, times)
        self.ends: list[PlayedLaunch] = []

    def launch(
        self,
        nodes: tuple[str, ...],
        leaves: float | None = None,
        *,
        save_seconds: float | None = None,
        foresees: bool = False,
    ) -> PlayedLaunch:
        start, before = self.now, self.saved
        try:
            end = super().launch(nodes, leaves, save_seconds=save_seconds, foresees=foresees)
        except WindowOver:
            self.ends.append(
                PlayedLaunch(
                    nodes, start, self.end, sign=None, fault=None, before=before, after=self.iteration,
                    saved=self.saved, reached=None,
                )
            )  # fmt: skip
            raise
        self.ends.append(end)
        return end


class PlayedRecord:
    """A replay below `folder` that is over. `score`: its own; `history`, `goodput`: as read back."""

    def __init__(
        self,
        folder: Path,
        window: Window,
        layout: Layout,
        times: Parameters,
        overrides: tuple[str, ...] = (),
    ) -> None:
        world = RecordingWorld(window, layout, times)
        tr11 = Production(world, folder, overrides)
        tr11.run.scheduler._ended = deque()  # all of them: sacct
        tr11.replay()
        self.card = tr11.run.card
        self.directory: RunDirectory = tr11.run.directory
        self.score = Score.of(world, "tr11")
        self.jobs: tuple[Job, ...] = tr11.run.scheduler.jobs()
        self._times = times
        self.end = world.end
        self.directory.paths.metrics.unlink(missing_ok=True)
        self._ends = tuple(world.ends)
        for job_id in self.directory.attempt_ids():
            self._complete(job_id)
        manifest = self.directory.paths.checkpoint(world.saved) / "manifest.json"
        write_json(manifest, {"created": world.end, "files": [], "step": world.saved})
        self.history: History = read_history(self.directory, self.jobs)
        self.goodput: Goodput = account(self.history, world.end)

    def _complete(self, job_id: str) -> None:
        paths = self.directory.paths
        folder = paths.attempt(job_id)
        steps: list[str] = []
        for path in sorted((folder / "launches").glob("*.json")):
            launch = LaunchRecord.of(read_json(path) or {})
            end = next((one for one in self._ends if abs(one.start - launch.start) < 1.0), None)
            if end is None:
                continue
            writer = PhaseWriter(paths.phases(job_id), launch.launch, print)
            for moment, phase, iteration in self._phases(end):
                if phase == "step":
                    line = {
                        "kind": "step", "iteration": iteration, "time": moment, "job_id": job_id,
                        "seconds_per_iteration": self._times.step,
                    }  # fmt: skip
                    steps.append(json.dumps(line))
                else:
                    writer.enter(phase, iteration, moment)
        with paths.metrics.open("a") as stream:
            stream.writelines(f"{line}\n" for line in steps)

    def _phases(self, end: PlayedLaunch) -> Iterator[tuple[float, str, int]]:
        """What the trainer of a launch would have logged, as `World.course` has it."""
        times = self._times
        yield end.start, "starting", end.before
        at = end.start + times.start_up
        stops = end.sign or end.end
        if end.fault is None and end.end < self.end:
            stops = end.end - times.save
        if at >= stops:
            return
        yield at, "loading", end.before
        at += times.load
        if at >= stops:
            return
        yield at, "training", end.before
        for iteration in range(end.before + 1, end.after + 1):
            at += times.step
            yield at, "step", iteration
            if iteration % times.interval == 0 and at < stops:
                if iteration % times.evaluation_interval == 0:
                    yield at, "evaluating", iteration
                    at += times.evaluation
                yield at, "saving", iteration
                at += times.save
                yield at, "training", iteration
        if stops < end.end and end.fault is None:
            yield stops, "saving", end.after
            yield end.end, "ended", end.after

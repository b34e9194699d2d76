"""Trackio: a database in a folder, which `trackio show` draws."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tr11ops.trackers.destination import TrackedRun
from tr11ops.trackers.points import Point
from trainer.contract.files import make_shared


def open_run(run: TrackedRun) -> TrackioRun:
    """The run in the project that is named as the run is."""
    folder = Path(run.place).absolute()
    make_shared(folder)
    os.environ["TRACKIO_DIR"] = str(folder)
    return TrackioRun(run)


class TrackioRun:
    """Raises trackio's errors. What was sent is in the database once `send` has returned."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self.known_as = run.variant
        self.look = f"TRACKIO_DIR={run.place} trackio show --project {run.name}"
        with _quiet():
            import trackio

            self._library: Any = trackio

    def last(self) -> int | None:
        from trackio.sqlite_storage import SQLiteStorage

        newest = SQLiteStorage.get_max_step_for_run(self._run.name, self._run.variant)
        if newest is None:
            return -1
        return int(newest)

    def rewind(self, iteration: int) -> None:
        raise NotImplementedError("Trackio takes no point back")

    def send(self, points: Sequence[Point]) -> None:
        with _quiet():
            opened = self._library.init(
                project=self._run.name,
                name=self._run.variant,
                config=dict(self._run.settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            for point in points:
                opened.log(dict(point.values), step=point.iteration)
            opened.finish()

    def close(self) -> None:
        """Nothing is open between two sendings."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the library prints for a person who trains with it."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield

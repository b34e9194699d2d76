"""TensorBoard: one event file for each session, in a folder of its own.

A session begins with a mark from which on TensorBoard forgets what earlier files say, so that what is
trained again replaces what was there, and what a killed session wrote is not drawn twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tr11ops.trackers.destination import TrackedRun
from tr11ops.trackers.points import Point
from trainer.contract.files import make_shared


def open_run(run: TrackedRun) -> TensorBoardRun:
    """Nothing is read: the cursor says how far it is."""
    return TensorBoardRun(Path(run.place) / run.variant)


class TensorBoardRun:
    """Raises OSError as the file system does."""

    def __init__(self, folder: Path) -> None:
        self.known_as = folder.name
        self.look = f"tensorboard --logdir {folder.parent}"
        self._folder = folder
        self._writer: Any = None

    def last(self) -> int | None:
        return None

    def rewind(self, iteration: int) -> None:
        from tensorboard.compat.proto import event_pb2

        self.close()
        mark = event_pb2.Event(wall_time=time.time(), step=iteration)
        mark.session_log.status = event_pb2.SessionLog.START
        self._opened().add_event(mark)

    def send(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        writer = self._opened()
        for point in points:
            values = [
                summary_pb2.Summary.Value(tag=name, simple_value=value)
                for name, value in point.values.items()
            ]
            summary = summary_pb2.Summary(value=values)
            event = event_pb2.Event(wall_time=point.time, step=point.iteration, summary=summary)
            writer.add_event(event)
        writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            make_shared(self._folder)
            self._writer = EventFileWriter(str(self._folder))
        return self._writer

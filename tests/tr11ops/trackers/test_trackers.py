"""Each tracker with its real library, read back with that library's own reader: one curve, whatever
happened to the training and to the sending.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.trackers.metrics_files import BEGAN, append, line, validation
from tests.waiting import until
from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.installed import missing
from tr11ops.trackers.cursor import Cursor
from tr11ops.trackers.destination import TRACKERS, Destination, TrackedRun, Tracker
from tr11ops.trackers.points import Point
from tr11ops.trackers.sending import agreed, send_new

Series = list[tuple[int, float]]


class Runner:
    """What `tr11 track` does with one tracker, session after session."""

    def __init__(self, tracker: Tracker, folder: Path) -> None:
        self.tracker = tracker
        self.path = folder / "metrics.jsonl"
        self.cursor = Cursor(tracker.name, str(folder / "place"), key="tr11-main-0a1b")
        self.run = TrackedRun(
            "tr11",
            "main",
            key=self.cursor.key,
            place=self.cursor.place,
            settings={"model.layers": 70},
        )

    def session(self, killed_after: int | None = None) -> None:
        """One `tr11 track`; a killed one ends after so many points, without a word."""
        opened = self.tracker.open(replace(self.run, known_as=self.cursor.known_as))
        start = agreed(self.cursor, opened, self.tracker.again)
        self.cursor = replace(start, known_as=opened.known_as)
        target: Destination = opened
        if killed_after is not None:
            target = Killed(opened, killed_after)
        with contextlib.suppress(Death):
            send_new(
                self.path,
                target,
                self.tracker.again,
                cursor=self.cursor,
                save=self.save,
                now=lambda: BEGAN,
            )
        opened.close()

    def save(self, cursor: Cursor) -> None:
        self.cursor = cursor


class Death(Exception):
    """The process was killed here."""


class Killed:
    """Sends some points of a batch, and dies before anyone writes down that it did."""

    def __init__(self, inner: Destination, points: int) -> None:
        self._inner, self._points = inner, points
        self.known_as, self.look = inner.known_as, inner.look

    def last(self) -> int | None:
        return self._inner.last()

    def rewind(self, iteration: int) -> None:
        self._inner.rewind(iteration)

    def send(self, points: Sequence[Point]) -> None:
        self._inner.send(points[: self._points])
        raise Death

    def close(self) -> None:
        self._inner.close()


# ----------------------------------------------------------------------------- their own readers
def of_tensorboard(runner: Runner, name: str) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(Path(runner.cursor.place) / "main"), size_guidance={"scalars": 0})
    read.Reload()
    events = read.Scalars(name)
    assert all(event.wall_time >= BEGAN + 60 * event.step for event in events)
    return [(event.step, round(event.value, 4)) for event in events]


def of_mlflow(runner: Runner, name: str) -> Series:
    from mlflow.tracking import MlflowClient

    from tr11ops.trackers.mlflow import address_of

    client = MlflowClient(tracking_uri=address_of(runner.cursor.place))
    experiment = client.get_experiment_by_name("tr11")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.data.params["model.layers"], run.info.run_name) == ("70", "main")
    history = client.get_metric_history(run.info.run_id, name)
    assert all(entry.timestamp >= 1000 * (BEGAN + 60 * entry.step) for entry in history)
    return [(entry.step, entry.value) for entry in history]


def of_trackio(runner: Runner, name: str) -> Series:
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("tr11") == ["main"]
    rows = SQLiteStorage.get_logs("tr11", "main")
    return [(row["step"], row[name]) for row in rows if name in row]


def of_wandb(runner: Runner, name: str) -> Series:
    """The records in the files that `wandb sync` sends, in its order; a step that is not above the
    one before is left out by the server.
    """
    found: dict[int, float] = {}
    for folder in sorted((Path(runner.cursor.place) / "wandb").glob("offline-run-*")):
        assert runner.cursor.key in folder.name
        (file,) = folder.glob("*.wandb")
        for step, values in history_in(file.read_bytes()):
            if name in values:
                found.setdefault(step, values[name])
    return sorted(found.items())


def history_in(content: bytes) -> list[tuple[int, dict[str, Any]]]:
    """W&B's log: LevelDB's format of blocks, of its own messages."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    place, block, parts, found = 7, 1 << 15, b"", []
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                row = record.history
                values = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in row.item
                }
                found.append((row.step.num, values))
    return found


READERS = {
    "tensorboard": of_tensorboard,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
    "wandb": of_wandb,
}


def shows(read: Callable[[Runner, str], Series], runner: Runner, expected: Series) -> None:
    """Its curve of losses is this one; W&B's own process may still be writing it down."""
    if runner.tracker.name == "wandb":
        until(lambda: len(read(runner, "lm_loss")) >= len(expected), "W&B's process to write")
    assert read(runner, "lm_loss") == expected


@pytest.mark.parametrize("name", TRACKERS)
def test_one_curve_after_kills_and_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = TRACKERS[name]
    if missing(tracker.packages):  # not imported here: each reads its environment then
        pytest.skip(f'pip install "tr11[{name}]"')
    monkeypatch.setenv("WANDB_MODE", "offline")
    runner, read = Runner(tracker, tmp_path), READERS[name]

    # a past with a resume in it, sent at once: what was trained again replaced what was there
    append(runner.path, [line(step, 1.0) for step in range(1, 21)])
    append(runner.path, [line(step, 2.0) for step in range(16, 25)])
    append(runner.path, [validation(24, 3.0)])
    runner.session()
    expected = [(step, 1.0) for step in range(1, 16)] + [(step, 2.0) for step in range(16, 25)]
    shows(read, runner, expected)
    assert read(runner, "valid/lm_loss") == [(24, 3.0)]
    assert runner.cursor.iteration == 24
    assert runner.cursor.offset == runner.path.stat().st_size

    # a sending that is killed in the middle, and typed again
    append(runner.path, [line(step, 4.0) for step in range(25, 35)])
    runner.session(killed_after=6)
    assert runner.cursor.iteration == 24
    runner.session()
    runner.session()
    expected += [(step, 4.0) for step in range(25, 35)]
    shows(read, runner, expected)

    # a resume behind what was sent already
    append(runner.path, [line(step, 5.0) for step in range(31, 41)])
    runner.session()
    first = {"replaced": 31, "skipped": 35}[tracker.again]
    expected = [(step, value) for step, value in expected if step < first]
    expected += [(step, 5.0) for step in range(first, 41)]
    shows(read, runner, expected)
    assert all(before < after for (before, _), (after, _) in pairwise(read(runner, "lm_loss")))


def test_a_store_that_was_lost_is_told_all_of_it_again(tmp_path: Path) -> None:
    if missing(("mlflow",)):
        pytest.skip('pip install "tr11[mlflow]"')
    runner = Runner(TRACKERS["mlflow"], tmp_path)
    append(runner.path, [line(step, 1.0) for step in range(1, 6)])
    runner.session()
    # the folder was removed: what is opened there next is empty
    runner.cursor = replace(runner.cursor, place=str(tmp_path / "empty"))
    runner.run = replace(runner.run, place=runner.cursor.place)
    append(runner.path, [line(6, 1.0)])
    runner.session()
    assert [step for step, _ in of_mlflow(runner, "lm_loss")] == list(range(1, 7))


# ----------------------------------------------------------------------------- what is refused
def test_a_library_that_is_missing_is_one_line() -> None:
    absent = replace(TRACKERS["wandb"], packages=("no_such_library",))
    with pytest.raises(Refusal) as refusal:
        absent.require()
    assert str(refusal.value) == (
        'tr11 track wandb needs no_such_library, not installed here; type: pip install "tr11[wandb]"'
    )


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("tensorboard", "http://here"),
        ("trackio", "online"),
        ("mlflow", "ftp://x"),
        ("wandb", "http://x"),
    ],
)
def test_a_place_that_a_tracker_does_not_know_is_refused(name: str, place: str) -> None:
    with pytest.raises(WrongUsage, match="takes a folder"):
        TRACKERS[name].check_place(place)

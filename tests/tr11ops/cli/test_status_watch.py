"""The live view: it stays alive while a look takes its time or fails, and is drawn within the
window it has.
"""

from __future__ import annotations

import io
import threading
import time

import pytest
from rich.console import Console

from tests.tr11ops.status_cases import HOUR, beats, snapshot, steps
from tests.waiting import until
from tr11ops.cli.progress import Watcher, watch_lines
from tr11ops.cli.status import StatusResult
from tr11ops.detect.registry import detect_all
from tr11ops.observe.snapshot import Snapshot
from tr11ops.status.assessment import Assessment
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.watchdog.verdict import judge


def look_at(seen: Snapshot) -> StatusResult:
    findings = detect_all(seen)
    return StatusResult(Assessment(seen, findings, judge(seen, findings), ExtraObservations()))


def until_looks(watcher: Watcher, count: int) -> None:
    until(lambda: watcher.poll(time.monotonic()) >= count, f"look {count}", pause=0.01)


def test_a_look_that_fails_is_said_and_the_next_one_is_tried() -> None:
    looks = iter([look_at(snapshot()), None, look_at(snapshot())])

    def look() -> StatusResult:
        found = next(looks)
        if found is None:
            raise OSError(28, "No space left on device", "/scratch\n/x")
        return found

    watcher = Watcher(look, 0.0)
    until_looks(watcher, 1)
    first = watcher.last
    watcher.seconds = 1000.0  # what fails now is not tried again at once
    until_looks(watcher, 2)
    hint = watcher.hint(time.monotonic())
    assert "the last look failed (OSError: [Errno 28] No space left on device" in hint
    assert "\n" not in hint
    assert watcher.last is first, "what was seen stays on the screen"
    assert "seen" in hint
    watcher._due = 0.0
    until_looks(watcher, 3)
    assert "failed" not in watcher.hint(time.monotonic())


def test_a_silent_scheduler_stops_no_clock_and_is_asked_once() -> None:
    gate, calls = threading.Event(), []

    def look() -> StatusResult:
        calls.append(threading.current_thread())
        gate.wait(30)
        return look_at(snapshot())

    watcher = Watcher(look, 1.0)
    for moment in (10.0, 11.0, 15.0):
        assert watcher.poll(moment) == 0
    assert len(calls) == 1
    assert calls[0].daemon, "Ctrl-C does not wait for it"
    assert watcher.hint(15.0) == "looking since 5 s; every 1 s; Ctrl-C ends"
    gate.set()
    calls[0].join(30)
    assert watcher.poll(10.0) == 1
    assert watcher.last is not None


def test_a_slow_look_makes_longer_pauses() -> None:
    watcher = Watcher(lambda: look_at(snapshot()), 1.0)
    began = time.monotonic() - 20.0  # as if it had been asked then
    watcher.poll(began)
    until(lambda: watcher.began is None, "the end of the look", pause=0.01)
    assert watcher.poll(time.monotonic() + 30.0) == 1
    assert watcher.began is None, "twice twenty seconds have not passed"
    watcher.poll(time.monotonic() + 45.0)
    assert watcher.began is not None or watcher.count == 2


@pytest.mark.parametrize("height", [1, 5, 24, 100])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_frame_never_exceeds_the_window(width: int, height: int) -> None:
    from tr11ops.cli.progress import _frame

    watcher = Watcher(
        lambda: look_at(snapshot(heartbeats=beats(age=HOUR), steps=steps(age=HOUR))), 10.0
    )
    until_looks(watcher, 1)
    target = io.StringIO()
    console = Console(
        file=target, width=width, height=height, color_system=None, legacy_windows=False
    )
    console.print(_frame(watcher, console, time.monotonic()))
    lines = target.getvalue().splitlines()
    assert len(lines) <= max(3, height)
    assert max(map(len, lines)) <= width
    assert lines[0].startswith(" STALLED ")
    assert lines[-1].startswith("seen 0 s ago") or width < 60


def test_lines_go_on_until_they_are_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter(
        [
            look_at(snapshot()),
            OSError(5, "Input/output error"),
            look_at(snapshot(jobs=(), heartbeats=())),
        ]
    )

    def look() -> StatusResult:
        found = next(looks, None)
        if found is None:
            raise KeyboardInterrupt
        if isinstance(found, OSError):
            raise found
        return found

    assert watch_lines(look, 0.0, True, Console(file=io.StringIO())) == 1
    shown = capsys.readouterr()
    assert [line[:14] for line in shown.out.splitlines()] == ['{"schema": 1, '] * 2
    assert (
        shown.err == "tr11: the look failed (OSError: [Errno 5] Input/output error); trying again\n"
    )

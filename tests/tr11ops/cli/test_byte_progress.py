"""Progress of bytes: a line now and then, a bar on a terminal, nothing where it is not wanted."""

from __future__ import annotations

import io
import os
import pty
import re
import threading
from contextlib import suppress

import pytest

from tr11ops.cli.progress import LINE_SECONDS, ByteProgress, Rate, by_file

GIB = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_line_now_and_then_with_rate_and_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    with ByteProgress("reading", 600 * GIB, stream=stream, clock=clock) as progress:
        for _ in range(120):
            clock.now += 1
            progress.advance(GIB)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 120 // LINE_SECONDS and max(map(len, lines)) < 80
    assert lines[0] == "reading: 60.0 GiB of 600.0 GiB (10 %), 1.0 GiB/s, 9 min left"
    assert progress.done == 120 * GIB


def test_what_is_renamed_or_is_of_no_size() -> None:
    assert ByteProgress("reading", 0, stream=io.StringIO()).line() == "reading: 0 B of 0 B"
    clock = Clock()
    progress = ByteProgress("reading", 2048, stream=io.StringIO(), clock=clock)
    progress.describe("step 5")
    clock.now += 2
    progress.advance(1024)
    assert progress.line() == "step 5: 1.0 KiB of 2.0 KiB (50 %), 512 B/s, 2 s left"


def test_a_rate_is_that_of_lately_and_never_of_a_standstill() -> None:
    rate = Rate(0.0)
    assert rate.per_second() is None
    for second in range(1, 101):
        rate.note(float(second), 10 * second)
    for second in range(101, 140):
        rate.note(float(second), 1000 + 50 * (second - 100))
    assert rate.per_second() == 50
    rate.note(139.0, 0)  # all had to be done again
    assert rate.per_second() is None


def test_quiet_shows_only_what_is_said() -> None:
    stream, clock = io.StringIO(), Clock()
    with ByteProgress("reading", 100, is_quiet=True, stream=stream, clock=clock) as progress:
        clock.now += 1000
        progress.advance(50)
        progress.say("step 5: BAD")
    assert stream.getvalue() == "step 5: BAD\n"


def test_many_threads_lose_no_byte() -> None:
    progress = ByteProgress("reading", 10**6, stream=io.StringIO())
    threads = [
        threading.Thread(target=lambda: [progress.advance(1) for _ in range(2000)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.done == 16_000


def test_a_bar_of_less_than_80_columns_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    reader, writer = pty.openpty()
    with (
        os.fdopen(writer, "w") as stream,
        ByteProgress("step 115311", 2_464 << 30, stream=stream) as progress,
    ):
        progress.advance(1_463 << 30)
        progress.say("step 9900: fine [720 files]")
        progress.describe("step 9950")
    text = ""
    with suppress(OSError):  # the other side is closed, and all is read
        while piece := os.read(reader, 1 << 16):
            text += piece.decode()
    os.close(reader)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").split("\n")
    assert "step 9900: fine [720 files]" in lines and max(map(len, lines)) <= 80
    assert any(
        line.startswith("step 9950 ") and line.endswith("59% 1.4 TiB of 2.4 TiB") for line in lines
    ), lines


def test_a_file_that_is_sent_again_counts_once() -> None:
    counts: list[int] = []
    told = by_file(counts.append)
    for path, position in (("a", 10), ("b", 5), ("a", 30), ("a", 0), ("a", 40)):
        told(path, position)
    assert counts == [10, 5, 20, -30, 40]

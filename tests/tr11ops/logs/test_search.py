"""Places in a log are found by few reads, and none is missed: compared with reading every line. Times,
ranges and ranks are read as people type them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.tr11ops.logs.log_cases import CountingReader, EndlessLog, log_of
from tr11ops.base.units import since
from tr11ops.dialects.reading import iteration_of
from tr11ops.logs import search
from tr11ops.logs.reader import line_start, tail_offset, whole_lines
from tr11ops.logs.search import attempt_regions, offset_since, step_regions
from tr11ops.logs.show import LAST_ITERATION, iterations, numbers, steps_since


@pytest.fixture
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LEAF_BYTES", 2048)


def steps_within(reader: CountingReader, first: int, last: int) -> list[int]:
    found = []
    for region in step_regions(reader, len(reader.data), first, last):
        for line in whole_lines(reader, region.start, region.end):
            iteration = iteration_of(line.decode())
            if iteration is not None and first <= iteration <= last:
                found.append(iteration)
    return found


runs = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 120)), min_size=1, max_size=6)


@pytest.mark.usefixtures("small_leaves")
@settings(max_examples=50, deadline=None)
@given(
    runs,
    st.integers(0, 520),
    st.integers(0, 100),
    st.sampled_from([b"", b"noise\n" * 40, b"x" * 9000 + b"\n"]),
)
def test_every_step_of_a_range_is_found_after_any_restart(
    pieces: list[tuple[int, int]], first: int, length: int, noise: bytes
) -> None:
    """Each piece is a start at some iteration, that trains for some steps."""
    written = list(chain.from_iterable(range(start, start + count) for start, count in pieces))
    rising = all(start <= before + count for (before, count), (start, _) in pairwise(pieces))
    reader = CountingReader(log_of(written, noise))
    found = steps_within(reader, first, first + length)
    wanted = [iteration for iteration in written if first <= iteration <= first + length]
    if rising:  # starts go on, or back
        assert found == wanted
    assert not set(found) - set(wanted)


def test_a_large_log_is_searched_by_few_reads() -> None:
    """100,000 steps with a restart each 1,000 that goes back by 100: some 60 MB, of which a
    thousandth part is read.
    """
    ranges = (range(max(1, end - 1100), end) for end in range(1000, 100_001, 1000))
    data = log_of(
        chain.from_iterable(ranges),
        b"[default3]: something else that a worker prints now and then\n" * 4,
    )
    reader = CountingReader(data)
    assert steps_within(reader, 50_000, 50_050) == list(range(50_000, 50_051))
    assert reader.amount < len(data) / 8 and reader.calls < 400
    reader = CountingReader(data)
    # redone after a restart
    assert steps_within(reader, 9_950, 9_960) == [*range(9_950, 9_961), *range(9_950, 9_961)]
    assert steps_within(reader, 200_000, 300_000) == []


@pytest.mark.usefixtures("small_leaves")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 500), max_size=150), st.integers(0, 520))
def test_the_first_line_since_a_time(minutes: list[int], since: int) -> None:
    start = time.mktime((2022, 5, 1, 0, 0, 0, 0, 0, -1))

    def stamped() -> Iterator[bytes]:
        for minute in sorted(minutes):
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start + 60 * minute))
            yield f"[{stamp}] PULSE: {minute} is running\n".encode() + b"no time here\n" * 3

    data = b"first\n" + b"".join(stamped())
    offset = offset_since(CountingReader(data), len(data), start + 60 * since)
    expected = re.search(
        rb"(?m)^\[.*PULSE: %d is" % next((m for m in sorted(minutes) if m >= since), -1), data
    )
    assert offset == (expected.start() if expected else None)


def test_a_log_of_two_gibibytes_is_not_read_whole() -> None:
    log = EndlessLog(2 << 30)
    wanted = 44_150  # within what a restart trained again
    found = [
        line
        for region in step_regions(log, log.size, wanted, wanted)
        for line in whole_lines(log, region.start, region.end)
        if iteration_of(line.decode()) == wanted
    ]
    expected = [
        number for number in range(log.size // log.STEP_BYTES) if log.iteration(number) == wanted
    ]
    assert len(found) == len(expected) == 2
    assert log.amount < log.size / 50 and log.calls < 1000

    log = EndlessLog(2 << 30)
    assert offset_since(log, log.size, log.time(100_000)) == 100_000 * log.STEP_BYTES
    assert log.amount < log.size / 10 and log.calls < 500

    log = EndlessLog(2 << 30)
    assert log.size - tail_offset(log, log.size, 40) < log.amount < 200_000


def test_an_attempts_part() -> None:
    def mark(job: str, launch: int) -> bytes:
        return f"tr11: attempt {job} launch {launch} on 2 nodes: n[1-2]\n".encode()

    data = (
        b"a\n"
        + mark("7", 1)
        + b"b\n"
        + mark("7", 2)
        + b"c\n"
        + mark("8", 1)
        + b"d\n"
        + mark("7", 3)
        + b"e"
    )
    regions, launches = attempt_regions(CountingReader(data), len(data), "7")
    assert [data[region.start : region.end] for region in regions] == [
        mark("7", 1) + b"b\n" + mark("7", 2) + b"c\n", mark("7", 3) + b"e",
    ]  # fmt: skip
    assert launches == 4
    assert attempt_regions(CountingReader(data), len(data), "9") == ([], 4)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.binary(max_size=8).map(lambda line: line.replace(b"\n", b"")), max_size=12),
    st.booleans(),
    st.integers(0, 14),
)
def test_the_tail_is_the_last_lines(lines: list[bytes], ended: bool, count: int) -> None:
    content = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    whole = content.split(b"\n")
    if whole[-1] == b"":
        whole.pop()
    shown = content[tail_offset(CountingReader(content), len(content), count) :]
    wanted = whole[-count:] if count else []
    assert shown.split(b"\n")[: len(wanted)] == wanted and len(shown) <= sum(
        len(line) + 1 for line in wanted
    )


@given(st.binary(max_size=40), st.integers(0, 45))
def test_lines_begin_after_line_ends(content: bytes, offset: int) -> None:
    offset = min(offset, len(content))
    begin = line_start(CountingReader(content), offset)
    assert begin == len(content) or begin == 0 or content[begin - 1] == ord("\n")
    assert b"\n" not in content[max(0, offset - 1) : max(0, begin - 1)]


NOON = time.mktime((2022, 5, 2, 12, 0, 0, 0, 0, -1))


def test_times() -> None:
    assert since("90s", NOON) == NOON - 90
    assert since("2h", NOON) == since("2 h ago", NOON) == NOON - 7200
    assert since("1.5d", NOON) == NOON - 1.5 * 86400
    assert since("11:30", NOON) == NOON - 1800
    assert since("12:30", NOON) == NOON - 23.5 * 3600  # yesterday
    assert since("2022-05-02", NOON) == NOON - 12 * 3600
    assert since("2022-05-02 11:59:30", NOON) == NOON - 30
    assert since("2022-05-02T10:00:00+00:00", NOON) == 1651485600.0


@pytest.mark.parametrize(
    "text", ["", "yesterday", "25:00", "2022-13-01", "-2h", "9" * 400 + "h", "2h30"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        since(text, NOON)


def test_ranges() -> None:
    assert iterations("100:200") == (100, 200)
    assert iterations("100:") == (100, LAST_ITERATION)
    assert iterations(":200") == (0, 200)
    assert iterations("7") == (7, 7)
    assert iterations("100-200") == (100, 200) and iterations("100-") == (100, LAST_ITERATION)
    for text in (":", "-", "", "a:b", "200:100", "200-100", "1:2:3"):
        with pytest.raises(ValueError, match="range"):
            iterations(text)
    assert numbers("0,8") == {0, 8} and numbers("0-3,9") == {0, 1, 2, 3, 9}
    for text in ("", "-1", "3-1", "a", "0-9999999", "1,,2"):
        with pytest.raises(ValueError, match="ranks"):
            numbers(text)


def test_steps_since_a_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [
        {"kind": "step", "iteration": number, "time": 1000.0 + number} for number in range(9000)
    ]
    lines = [json.dumps(record) for record in records]
    lines.insert(8990, json.dumps({"kind": "validation", "time": 9995.0}))
    path.write_text("\n".join(lines) + '\n{"kind": "step", "ti')
    assert steps_since(path, 1000.0 + 8995) == 5
    assert steps_since(path, 0.0) == 9000
    assert steps_since(path, 1e12) == 0
    assert steps_since(tmp_path / "none", 0.0) is None

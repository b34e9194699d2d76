"""Where the last whole line or record ends: against TensorBoard's own reader, at every possible
cut.
"""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import given, strategies as st
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter

from tests.tr11ops.hub.sync_cases import record
from tr11ops.hub import masking
from tr11ops.hub.masking import Whole, whole_events, whole_lines


def reader(data: bytes, piece: int = 1 << 20):
    return lambda offset, length: data[offset : offset + min(length, piece)]


def ends_of(parts: list[bytes]) -> list[int]:
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    return ends


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_records_are_those_that_tensorboard_writes(contents):
    class Stream(list):
        def write(self, piece):
            self.append(bytes(piece))

        def flush(self):
            pass

    stream = Stream()
    writer = RecordWriter(stream)
    for content in contents:
        writer.write(content)
    assert b"".join(stream) == b"".join(map(record, contents))


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_the_end_is_that_of_the_last_whole_record_at_every_cut(contents, data):
    parts = [record(content) for content in contents]
    whole, ends = b"".join(parts), ends_of(parts)
    cut = data.draw(st.integers(0, len(whole)))
    expected = max(end for end in ends if end <= cut)
    start = data.draw(st.sampled_from([end for end in ends if end <= cut]))
    assert whole_events(reader(whole[:cut]), start, cut) == Whole(expected)


def test_what_is_kept_is_what_tensorboard_reads(tmp_path: Path):
    whole = b"".join(record(bytes([number]) * number) for number in range(1, 30))
    path = tmp_path / "events.out.tfevents.1"
    for cut in range(0, len(whole), 7):
        end = whole_events(reader(whole), 0, cut).end
        path.write_bytes(whole[:end])
        kept = list(RawEventFileLoader(str(path)).Load())
        path.write_bytes(whole[:cut])
        assert kept == list(RawEventFileLoader(str(path)).Load())


@given(st.binary(max_size=200), st.integers(0, 200))
def test_garbage_never_raises_and_never_ends_beyond_the_file(garbage, start):
    start = min(start, len(garbage))
    found = whole_events(reader(garbage), start, len(garbage))
    assert start <= found.end <= len(garbage)


def test_a_damaged_record_counts_once_a_good_one_follows():
    first, second = bytearray(record(b"first")), record(b"second")
    first[13] ^= 1
    assert whole_events(reader(bytes(first)), 0, len(first)).end == 0
    both = bytes(first) + second
    assert whole_events(reader(both), 0, len(both)) == Whole(len(both))
    first[0] ^= 1  # a length that is wrong hides all that follows
    assert whole_events(reader(bytes(first) + second), 0, len(both)) == Whole(0, is_sound=False)


def test_a_record_larger_than_a_piece_and_one_beyond_the_file(monkeypatch):
    monkeypatch.setattr(masking, "PIECE_BYTES", 64)
    large = record(b"x" * 1000)
    data = record(b"a") + large + record(b"b" * 70)
    for cut in (len(data), len(data) - 1):
        assert whole_events(reader(data), 0, cut).end == (
            cut if cut == len(data) else 17 + len(large)
        )
    header = struct.pack("<Q", 2**64 - 1)
    endless = header + struct.pack("<I", masking.masked_crc(header)) + b"x" * 50
    assert whole_events(reader(endless), 0, len(endless)) == Whole(0)


@given(st.binary(max_size=100), st.integers(0, 100), st.integers(1, 7))
def test_lines_end_with_a_newline_and_before_a_hole(data, start, piece):
    start = min(start, len(data))
    found = whole_lines(reader(data, piece), start, len(data))
    until = data.find(b"\0", start)
    sound = data[start:] if until < 0 else data[start:until]
    assert found == Whole(start + sound.rfind(b"\n") + 1, is_sound=until < 0)

"""The ledger: what was written is read, in order; what was changed is noticed; what was cut by a crash is survived."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tr11ops.journal import GENESIS, Journal, read_journal

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.lists(
    st.tuples(
        st.text(max_size=12), st.text(max_size=30), st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3)
    ),
    min_size=1,
    max_size=6,
)


def written(folder: Path, count: int = 4, writer: str = "host-1") -> Path:
    journal = Journal(folder, writer)
    for number in range(count):
        journal.write("kind", f"why {number}", {"number": number}, who="me", when=float(number))
    return journal.path


@settings(max_examples=40, deadline=None)
@given(ENTRIES)
def test_everything_comes_back(entries: list[tuple[str, str, dict[str, object]]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        journal = Journal(Path(name) / "journal", "host-1")
        for kind, why, data in entries:
            journal.write(kind, why, data, who="me", when=1.0)
        ledger = read_journal(journal.folder)
    assert ledger.faults == () and ledger.is_sound
    assert [(entry.kind, entry.why, dict(entry.data)) for entry in ledger.entries] == entries
    assert [entry.sequence for entry in ledger.entries] == list(range(len(entries)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = written(Path(name))
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        ledger = read_journal(Path(name))
    changed = [entry for entry in ledger.entries if entry.why != f"why {entry.sequence}" or entry.who != "me"]
    assert ledger.faults and not changed


def test_a_torn_last_line_is_reported_and_the_next_writer_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-30])
    torn = read_journal(tmp_path)
    assert [fault.kind for fault in torn.faults] == ["torn"] and torn.is_sound and len(torn.entries) == 2
    Journal(tmp_path, "host-1").write("after", who="me", when=9.0)
    ledger = read_journal(tmp_path)
    assert [entry.sequence for entry in ledger.entries] == [0, 1, 2]
    assert [fault.kind for fault in ledger.faults] == ["torn"] and ledger.is_sound


@pytest.mark.parametrize("damage", ["drop", "swap", "forge", "edit"])
def test_a_broken_chain_is_reported(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path, 4)
    lines = path.read_text().splitlines(keepends=True)
    if damage == "drop":
        del lines[1]
    elif damage == "swap":
        lines[1], lines[2] = lines[2], lines[1]
    elif damage == "forge":
        lines.insert(2, lines[0])
    else:
        lines[2] = lines[2].replace("why 2", "why 9")
    path.write_text("".join(lines))
    ledger = read_journal(tmp_path)
    assert not ledger.is_sound
    assert str(ledger.faults[0]).startswith("journal host-1.jsonl line ")


def test_writers_are_merged_by_time(tmp_path: Path) -> None:
    for writer, moments in (("b-2", (1.0, 4.0)), ("a-1", (2.0, 3.0))):
        for moment in moments:
            Journal(tmp_path, writer).write("kind", when=moment, who="me")
    ledger = read_journal(tmp_path)
    assert [(entry.time, entry.writer) for entry in ledger.entries] == [
        (1.0, "b-2"),
        (2.0, "a-1"),
        (3.0, "a-1"),
        (4.0, "b-2"),
    ]
    assert {entry.previous for entry in ledger.entries if entry.sequence == 0} == {GENESIS}


def test_threads_of_one_writer_keep_one_chain(tmp_path: Path) -> None:
    def many() -> None:
        for _ in range(10):
            Journal(tmp_path, "host-1").write("kind", who="me")

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger = read_journal(tmp_path)
    assert ledger.faults == () and sorted(entry.sequence for entry in ledger.entries) == list(range(40))


def test_a_long_entry_is_found_again_as_the_last_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "host-1")
    journal.write("long", "x" * 3_000_000, who="me")
    journal.write("after", who="me")
    assert read_journal(tmp_path).faults == ()


def test_nothing_is_made_before_the_first_entry_and_an_absent_journal_is_empty(tmp_path: Path) -> None:
    Journal(tmp_path / "journal")
    assert not (tmp_path / "journal").exists()
    assert read_journal(tmp_path / "journal").entries == ()
    with pytest.raises(ValueError, match="cannot name a journal file"):
        Journal(tmp_path, "../escape")


def test_an_unreadable_file_is_a_fault_and_not_silence(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    ledger = read_journal(tmp_path)
    assert len(ledger.entries) == 4 and [fault.kind for fault in ledger.faults] == ["unreadable"]


def test_entries_are_plain_json_lines(tmp_path: Path) -> None:
    lines = written(tmp_path, 2).read_text().splitlines()
    assert {"time", "writer", "sequence", "kind", "who", "why", "data", "previous", "hash"} == set(json.loads(lines[1]))
    assert json.loads(lines[1])["previous"] == json.loads(lines[0])["hash"]

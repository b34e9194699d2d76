"""The ledger: what was written is read, in order; what was changed is noticed; what was cut by a
crash is survived.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.forks import exit_code, forked
from tests.plugins.planted_secrets import planted
from tr11ops.rundir import journal as journal_module
from tr11ops.rundir.journal import GENESIS, Journal, read_journal, user_name, writer_name

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
ENTRIES = st.lists(
    st.tuples(
        st.text(max_size=12),
        st.text(max_size=30),
        st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3),
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
    changed = [
        entry
        for entry in ledger.entries
        if entry.why != f"why {entry.sequence}" or entry.who != "me"
    ]
    assert ledger.faults and not changed


def test_a_torn_last_line_is_reported_and_writing_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-30])
    torn = read_journal(tmp_path)
    assert (
        [fault.kind for fault in torn.faults] == ["torn"]
        and torn.is_sound
        and len(torn.entries) == 2
    )
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
    assert ledger.faults == () and sorted(entry.sequence for entry in ledger.entries) == list(
        range(40)
    )


def test_a_long_entry_is_found_again_as_the_last_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "host-1")
    journal.write("long", "x" * 3_000_000, who="me")
    journal.write("after", who="me")
    assert read_journal(tmp_path).faults == ()


def test_nothing_is_made_before_the_first_entry(tmp_path: Path) -> None:
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
    assert {"time", "writer", "sequence", "kind", "who", "why", "data", "previous", "hash"} == set(
        json.loads(lines[1])
    )
    assert json.loads(lines[1])["previous"] == json.loads(lines[0])["hash"]


# -------------------------------------------------------------------------- many writers, few files
def test_a_thousand_short_lived_writers_leave_one_file(tmp_path: Path) -> None:
    """As a watchdog that cron starts each hour: every process is a new writer."""
    for number in range(12):
        work = partial(Journal(tmp_path).write, "pulse", data={"number": number}, who="me")
        assert exit_code(forked(work)) == 0
    ledger = read_journal(tmp_path)
    assert ledger.faults == () and [entry.sequence for entry in ledger.entries] == list(range(12))
    assert [path.name for path in tmp_path.iterdir()] == [f"{writer_name()}.jsonl"]


def test_writers_at_once_keep_one_chain(tmp_path: Path) -> None:

    def write_ten() -> None:
        for number in range(10):
            Journal(tmp_path).write("pulse", data={"number": number}, who="me")

    children = [forked(write_ten) for _ in range(5)]
    assert [exit_code(child) for child in children] == [0] * 5
    ledger = read_journal(tmp_path)
    assert ledger.faults == () and sorted(entry.sequence for entry in ledger.entries) == list(
        range(50)
    )


def test_a_writer_frozen_with_the_file_open_stops_no_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "LOCK_SECONDS", 0.02)
    first = Journal(tmp_path)
    first.write("before", who="me", when=1.0)
    with first.path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        Journal(tmp_path).write("meanwhile", who="me", when=2.0)
    first.write("after", who="me", when=3.0)
    ledger = read_journal(tmp_path)
    assert ledger.faults == () and [entry.kind for entry in ledger.entries] == [
        "before",
        "meanwhile",
        "after",
    ]
    assert [entry.writer == first.writer for entry in ledger.entries] == [True, False, True]


def test_without_file_locks_each_thread_has_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(journal_module.fcntl, "flock", refuse)
    threads = [
        threading.Thread(target=lambda: Journal(tmp_path).write("kind", who="me")) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Journal(tmp_path).write("kind", who="me")
    ledger = read_journal(tmp_path)
    assert ledger.faults == () and len(ledger.entries) == 5
    assert not (tmp_path / f"{writer_name()}.jsonl").read_bytes()


# ---------------------------------------------------------------------- reading the last days alone
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(0, 70), st.booleans())
def test_the_end_of_a_journal_agrees_with_the_whole(
    steps: list[int], since: int, is_torn: bool
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "_TAIL_BYTES", 300)
        journal = Journal(Path(name), "host-1")
        for moment in sorted(steps):
            journal.write("kind", "w" * moment, who="me", when=float(moment))
        if is_torn:
            with journal.path.open("ab") as stream:
                stream.write(b'{"cut')
        whole, part = read_journal(Path(name)), read_journal(Path(name), since=float(since))
    assert part.entries == tuple(entry for entry in whole.entries if entry.time >= since)
    assert part.is_sound and [fault.kind for fault in part.faults] == [
        fault.kind for fault in whole.faults
    ]


def test_a_change_near_the_end_is_noticed_without_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_TAIL_BYTES", 2000)
    path = written(tmp_path, 50)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join((lines[0].replace("why 0", "why 9"), *lines[1:48], lines[49])))
    assert [fault.kind for fault in read_journal(tmp_path, since=47.0).faults] == ["broken"]
    path.write_text("".join((lines[0].replace("why 0", "why 9"), *lines[1:])))
    assert read_journal(tmp_path, since=47.0).faults == () and not read_journal(tmp_path).is_sound


def test_files_that_no_one_wrote_to_since_are_not_opened(tmp_path: Path) -> None:
    old, new = written(tmp_path, writer="old-1"), written(tmp_path, writer="new-1")
    os.utime(old, (1000.0, 1000.0))
    old.chmod(0)
    assert {entry.writer for entry in read_journal(tmp_path, since=0.0).entries} >= {"new-1"}
    recent = read_journal(tmp_path, since=10_000.0)
    assert recent.faults == () and recent.entries == () and new.exists()


def test_a_folder_that_cannot_be_listed_is_no_empty_journal(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("")
    ledger = read_journal(tmp_path / "journal")
    assert [(fault.file, fault.kind) for fault in ledger.faults] == [
        ("journal", "unreadable")
    ] and not ledger.is_sound


def test_a_pipe_is_a_fault_and_no_trap(tmp_path: Path) -> None:
    written(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert [(fault.file, fault.kind) for fault in read_journal(tmp_path).faults] == [
        ("pipe.jsonl", "unreadable")
    ]


def test_lines_of_the_first_version_are_still_read(tmp_path: Path) -> None:
    """Their keys stood in another order than what was hashed."""
    order = ("time", "writer", "sequence", "kind", "who", "why", "data", "previous", "hash")
    path = written(tmp_path, 3)
    values = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps({key: value[key] for key in order}) + "\n" for value in values)
    )
    Journal(tmp_path, "host-1").write("new", who="me", when=9.0)
    ledger = read_journal(tmp_path)
    assert ledger.faults == () and [entry.sequence for entry in ledger.entries] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "content", ['"data":[1]', '"time":"soon"', '"time":NaN', '"sequence":null', '"who":7']
)
def test_an_entry_with_a_value_of_the_wrong_kind_is_damage(tmp_path: Path, content: str) -> None:
    path = written(tmp_path, 1)
    body = json.loads(path.read_text())
    del body["hash"]
    key, _, value = content.partition(":")
    text = json.dumps({**body, json.loads(key): 0}, separators=(",", ":"), sort_keys=True).replace(
        f"{key}:0", content
    )
    seal = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(f'{text[:-1]},"hash":"{seal}"}}\n' + "[" * 100_000 + "\n")
    ledger = read_journal(tmp_path)
    assert ledger.entries == () and [fault.kind for fault in ledger.faults] == ["broken"], value


@pytest.mark.parametrize(("line", "secret"), planted()[::5])
def test_no_entry_holds_a_secret(tmp_path: Path, line: str, secret: str) -> None:
    """The whole group reads the journal, whoever writes it."""
    Journal(tmp_path).write(
        "note", line, {"said": line, "deep": [{"told": line, "step": 100}], "path": "/a/b"}
    )
    assert not [path for path in tmp_path.iterdir() if secret in path.read_text()]
    (entry,) = read_journal(tmp_path).entries
    assert (
        entry.kind == "note"
        and entry.data["deep"][0]["step"] == 100
        and entry.data["path"] == "/a/b"
    )
    assert read_journal(tmp_path).entries == (entry,), "and the chain of entries holds"


def test_a_look_from_a_terminal_and_one_from_a_crontab_are_told_apart() -> None:
    """A session of its own has no terminal, as what cron starts; the other has one of its own."""
    program = "import tr11ops.rundir.journal as journal; print(journal.who_looks())"
    command = [sys.executable, "-c", program]
    alone = subprocess.run(command, start_new_session=True, capture_output=True, text=True)
    assert alone.stdout.strip() == f"{user_name()}, without a terminal (cron or a script)"
    typed, keyboard = pty.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=keyboard, stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.communicate(timeout=60)[0].strip() == user_name()
    os.close(typed)
    os.close(keyboard)

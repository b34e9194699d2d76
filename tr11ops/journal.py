"""The append-only ledger of what tr11 saw and did: JSON lines, one file per writer, chained by hashes.

Shared file systems do not append atomically, so no two writers share a file; the files are merged when read.
Each entry holds the hash of the one before it in the same file: a line that was changed, dropped from the middle or
put in is noticed. (Lines cut off the end are not: nothing after them says that they were there.)
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tr11ops.rundir import make_shared
from trainer.contract import host_name

GENESIS = "0" * 64  # what the first entry of a file names as its predecessor
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One thing that was seen or done. `time` is in seconds since the epoch, `sequence` counts from 0 per writer."""

    time: float
    writer: str
    sequence: int
    kind: str
    who: str
    why: str
    data: Mapping[str, Any] = field(default_factory=dict)
    previous: str = GENESIS
    hash: str = ""


@dataclass(frozen=True)
class Fault:
    """Something wrong with a journal file. `kind` is torn (a write that was cut), broken (changed) or unreadable."""

    file: str
    line: int
    kind: str
    message: str

    def __str__(self) -> str:
        return f"journal {self.file} line {self.line}: {self.message}"


@dataclass(frozen=True)
class Ledger:
    """All entries of all writers in order of time, and what was wrong with the files."""

    entries: tuple[Entry, ...]
    faults: tuple[Fault, ...]

    @property
    def is_sound(self) -> bool:
        """True when every chain holds. A torn last line is what a crash leaves, and does not count against it."""
        return not any(fault.kind != "torn" for fault in self.faults)


def user_name() -> str:
    """The name of the person at the keyboard, or the number of the user where no name is known."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


class Journal:
    """Writes entries to this process's own file below `folder`. Nothing is created before the first entry."""

    def __init__(self, folder: Path, writer: str | None = None):
        self.folder = folder
        self.writer = writer or writer_name()
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.writer):
            raise ValueError(f"{self.writer!r} cannot name a journal file; use letters, digits, dots and dashes")

    @property
    def path(self) -> Path:
        return self.folder / f"{self.writer}.jsonl"

    def write(
        self,
        kind: str,
        why: str = "",
        data: Mapping[str, Any] | None = None,
        who: str | None = None,
        when: float | None = None,
    ) -> Entry:
        """Append one entry and flush it to disk before returning it.

        Raises OSError as the file system does; nothing, or a torn line that the next entry closes, is then written.
        """
        make_shared(self.folder)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o664)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                os.fchmod(descriptor, 0o664)
            _lock(descriptor)
            last, is_torn = _tail(descriptor)
            entry = _sealed(
                time=time.time() if when is None else when,
                writer=self.writer,
                sequence=last.sequence + 1 if last else 0,
                kind=kind,
                who=user_name() if who is None else who,
                why=why,
                data=json.loads(json.dumps(dict(data or {}), default=str)),
                previous=last.hash if last else GENESIS,
            )
            text = ("\n" if is_torn else "") + _line(entry) + "\n"
            _write_all(descriptor, text.encode("utf-8"))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return entry


def writer_name() -> str:
    """Host and process id: no two writers that live at the same time share it."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", host_name()) or "host"
    return f"{host}-{os.getpid()}"


def read_journal(folder: Path) -> Ledger:
    """Merge and verify every writer's file. No folder is an empty ledger; a file that cannot be read is a fault."""
    entries: list[Entry] = []
    faults: list[Fault] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            content = path.read_bytes()
        except OSError as error:
            faults.append(Fault(path.name, 0, "unreadable", f"cannot be read ({error.strerror or error})"))
            continue
        found, wrong = _verify(path.name, content)
        entries += found
        faults += wrong
    entries.sort(key=lambda entry: (entry.time, entry.writer, entry.sequence))
    return Ledger(tuple(entries), tuple(faults))


def _verify(name: str, content: bytes) -> tuple[list[Entry], list[Fault]]:
    """Entries of one file whose own hash holds, and its faults. A broken link is reported, and reading goes on."""
    entries: list[Entry] = []
    faults: list[Fault] = []
    lines = content.split(b"\n")
    unfinished = lines.pop()
    previous, suspect = GENESIS, 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = _parse(line)
        if entry is None:
            # A cut write is followed by an entry that still names the one before the cut; judged when that is seen.
            suspect = suspect or number
            continue
        if entry.previous != previous:
            faults.append(
                Fault(name, number, "broken", "the chain is broken: this or an earlier line was changed or removed")
            )
        elif suspect:
            faults.append(Fault(name, suspect, "torn", "a write was cut short; nothing else is missing"))
        suspect = 0
        previous = entry.hash
        entries.append(entry)
    if suspect:
        faults.append(Fault(name, suspect, "broken", "the chain is broken: this line is not what was written"))
    if unfinished:
        faults.append(Fault(name, len(lines) + 1, "torn", "the last line was cut short"))
    return entries, faults


def _parse(line: bytes) -> Entry | None:
    """The entry in a line, or None when it is not one or its hash does not fit its content."""
    try:
        entry = Entry(**json.loads(line))
        return entry if entry.hash == _digest(entry) else None
    except (ValueError, TypeError):
        return None


def _content(entry: Entry) -> dict[str, Any]:
    return {
        "time": entry.time,
        "writer": entry.writer,
        "sequence": entry.sequence,
        "kind": entry.kind,
        "who": entry.who,
        "why": entry.why,
        "data": entry.data,
        "previous": entry.previous,
    }


def _digest(entry: Entry) -> str:
    text = json.dumps(_content(entry), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _sealed(**content: Any) -> Entry:
    return Entry(**content, hash=_digest(Entry(**content)))


def _line(entry: Entry) -> str:
    return json.dumps({**_content(entry), "hash": entry.hash}, separators=(",", ":"))


def _tail(descriptor: int) -> tuple[Entry | None, bool]:
    """The last whole entry of the open file, and whether an unfinished line follows it."""
    size = os.fstat(descriptor).st_size
    length = min(size, _TAIL_BYTES)
    while True:
        content = os.pread(descriptor, length, size - length)
        lines = content.split(b"\n")
        is_torn = bool(lines.pop())
        whole = lines if length == size else lines[1:]
        entry = _last(whole)
        if entry is not None or length == size:
            return entry, is_torn
        length = min(size, length * 4)


def _last(lines: Iterable[bytes]) -> Entry | None:
    for line in reversed(list(lines)):
        entry = _parse(line)
        if entry is not None:
            return entry
    return None


def _lock(descriptor: int) -> None:
    """Keep a second writer of the same name out (threads of one process). Some shared file systems have no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]

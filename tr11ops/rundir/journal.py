"""The append-only ledger of what tr11 saw and did: JSON lines, chained by hashes, merged when they
are read.

    journal/HOST-USER-BOOT.jsonl         all processes of one user on one running machine, one after another
    journal/HOST-USER-BOOT-P-T.jsonl     one thread's own, where the file system has no locks, or someone keeps one

Shared file systems do not append atomically, so no two machines share a file. Processes of one
machine take turns by a lock that its own kernel keeps (BOOT is that kernel's number): thousands of
short-lived writers leave a few files. Each entry holds the hash of the one before it in the same
file: a line that was changed, dropped from the middle or put in is noticed. (Lines cut off the end
are not: nothing after them says that they were there.)
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from tr11ops.base.now import now
from trainer.contract.documents import record_of_text
from trainer.contract.files import host_name, login_name, make_shared, open_shared
from trainer.contract.record import Finite, Record
from trainer.contract.secret_shapes import without_secrets
from trainer.contract.state_file import is_damage

GENESIS = "0" * 64  # what the first entry of a file names as its predecessor
# anyone who keeps the file for longer is frozen: then we write a file of our own
LOCK_SECONDS = 2.0
CLOCK_MARGIN_SECONDS = 3600.0  # between a writer's clock and the file system's
BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
_TAIL_BYTES = 1 << 16
LARGEST_BYTES = 256 << 20  # of one writer's file: years of a busy run
_HASH_BYTES = len(',"hash":""}') + 64  # at the end of a line


class JournalEntry(Record, forbid_unknown_fields=True):
    """One thing that was seen or done. `time` is in seconds since the epoch, `sequence` counts from
    0 per writer.
    """

    time: Finite
    writer: str
    sequence: int
    kind: str
    who: str
    why: str
    data: Mapping[str, Any] = {}
    previous: str = GENESIS
    hash: str = ""


class JournalFault(Record):
    """Something wrong with a journal file. `kind` is torn (a write that was cut), broken (changed)
    or unreadable.
    """

    file: str
    line: int
    kind: str
    message: str

    def __str__(self) -> str:
        return f"journal {self.file} line {self.line}: {self.message}"


class Ledger(Record):
    """All entries of all writers in order of time, and what was wrong with the files."""

    entries: tuple[JournalEntry, ...]
    faults: tuple[JournalFault, ...]

    @property
    def is_sound(self) -> bool:
        """True when every chain holds. A torn last line is what a crash leaves, and does not count
        against it.
        """
        return not any(fault.kind != "torn" for fault in self.faults)


def user_name() -> str:
    """The name of the person at the keyboard, or the number of the user where no name is known."""
    return os.environ.get("SUDO_USER") or login_name()


def who_looks() -> str:
    """The user, and whether it is one at a terminal: what a crontab of one's own starts has none."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return f"{user_name()}, without a terminal (cron or a script)"
    return user_name()


class Journal:
    """Writes entries to this machine's file for this user below `folder`. Nothing is created before
    the first entry.
    """

    def __init__(self, folder: Path, writer: str | None = None):
        self.folder = folder
        self.writer = writer or writer_name()
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.writer):
            raise ValueError(
                f"{self.writer!r} cannot name a journal file; use letters, digits, dots and dashes"
            )

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
    ) -> JournalEntry:
        """Append one entry and flush it to disk before returning it; what has the form of a secret
        is left out.

        Raises OSError as the file system does; nothing, or a torn line that the next entry closes,
        is then written.
        """
        make_shared(self.folder)
        writer, descriptor = self._open()
        try:
            last, is_torn = _tail(descriptor)
            entry = _sealed(
                time=now() if when is None else when,
                writer=writer,
                sequence=last.sequence + 1 if last else 0,
                kind=kind,
                who=user_name() if who is None else who,
                why=without_secrets(why),
                data=_without_secrets(json.loads(json.dumps(dict(data or {}), default=str))),
                previous=last.hash if last else GENESIS,
            )
            text = ("\n" if is_torn else "") + _line(entry) + "\n"
            _write_all(descriptor, text.encode("utf-8"))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return entry

    def _open(self) -> tuple[str, int]:
        """The name and the descriptor of a file that no one else writes to until the descriptor is
        closed.
        """
        descriptor = _open_sound(self.path)
        if descriptor is not None and _lock(descriptor):
            return self.writer, descriptor
        if descriptor is not None:
            os.close(descriptor)
        own = f"{self.writer}-{os.getpid()}-{threading.get_native_id()}"
        return own, _open(self.folder / f"{own}.jsonl")


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_secrets(held) for name, held in value.items()}
    if isinstance(value, list):
        return [_without_secrets(held) for held in value]
    if isinstance(value, str):
        return without_secrets(value)
    return value


def writer_name() -> str:
    """Host, user and boot of this machine's kernel; and the process, where the kernel does not tell
    its boot.
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "_", host_name()) or "host"
    try:
        boot = re.sub(r"[^0-9a-f]", "", BOOT_FILE.read_text(encoding="ascii"))[:8]
    except OSError:
        boot = f"p{os.getpid()}"
    return f"{host}-{os.geteuid()}-{boot}"


def read_journal(folder: Path, since: float | None = None) -> Ledger:
    """Merge and verify every writer's file. No folder is an empty ledger; a file that cannot be
    read is a fault.

    `since` (seconds since the epoch) leaves older entries out: files that were last changed before
    are not opened, and of the others only the ends are read, so that the cost is that of what is
    asked for.
    """
    entries: list[JournalEntry] = []
    faults: list[JournalFault] = []
    for path in _files(folder, faults):
        try:
            content, is_whole = _content_since(path, since)
        except OSError as error:
            faults.append(
                JournalFault(
                    path.name, 0, "unreadable", f"cannot be read ({error.strerror or error})"
                )
            )
            continue
        found, wrong = _verify(path.name, content, is_whole)
        entries += found if since is None else (entry for entry in found if entry.time >= since)
        faults += wrong
    entries.sort(key=lambda entry: (entry.time, entry.writer, entry.sequence))
    return Ledger(tuple(entries), tuple(faults))


def _files(folder: Path, faults: list[JournalFault]) -> list[Path]:
    """The journal's files. A folder that cannot be listed is a fault: it may hold anything."""
    try:
        names = os.listdir(folder)  # noqa: PTH208  Path.glob takes a folder without access for an empty one
    except FileNotFoundError:
        return []
    except OSError as error:
        faults.append(
            JournalFault(
                folder.name, 0, "unreadable", f"cannot be listed ({error.strerror or error})"
            )
        )
        return []
    return [
        folder / name
        for name in sorted(names)
        if name.endswith(".jsonl") and not name.startswith(".")
    ]


def _content_since(path: Path, since: float | None) -> tuple[bytes, bool]:
    """A file's bytes back to an entry before `since`, and whether these are all that it has. Raises
    OSError.
    """
    # a pipe of that name would wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        if since is not None and status.st_mtime < since - CLOCK_MARGIN_SECONDS:
            return b"", False
        size = status.st_size
        if size > LARGEST_BYTES:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than any journal has")
        if since is None:
            length = size
        else:
            length = min(size, _TAIL_BYTES)
        while True:
            content = _read(descriptor, length, size - length)
            if length == size:
                return content, True
            content = content[content.find(b"\n") + 1 :]
            first = next(
                (entry for line in content.split(b"\n") if (entry := _parse(line)) is not None),
                None,
            )
            if first is not None and since is not None and first.time < since:
                return content, False
            length = min(size, length * 2)
    finally:
        os.close(descriptor)


def _read(descriptor: int, length: int, offset: int) -> bytes:
    """`length` bytes, or as many as there are: one call returns at most 2 GiB."""
    parts = []
    while length > 0 and (part := os.pread(descriptor, length, offset)):
        parts.append(part)
        length, offset = length - len(part), offset + len(part)
    return b"".join(parts)


def _verify(
    name: str, content: bytes, is_whole: bool
) -> tuple[list[JournalEntry], list[JournalFault]]:
    """Entries of one file whose own hash holds, and its faults. A broken link is reported, and
    reading goes on.

    Of a part that is not the whole file, the first entry's link is believed, and its first line
    counts as line 1.
    """
    entries: list[JournalEntry] = []
    faults: list[JournalFault] = []
    lines = content.split(b"\n")
    unfinished = lines.pop()
    previous, suspect = GENESIS if is_whole else "", 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = _parse(line)
        if entry is None:
            # A cut write is followed by an entry that still names the one before the cut; judged
            # when that is seen.
            suspect = suspect or number
            continue
        if previous and entry.previous != previous:
            faults.append(
                JournalFault(
                    name,
                    number,
                    "broken",
                    "the chain is broken: this or an earlier line was changed or removed",
                )
            )
        elif suspect:
            faults.append(
                JournalFault(
                    name, suspect, "torn", "a write was cut short; nothing else is missing"
                )
            )
        suspect = 0
        previous = entry.hash
        entries.append(entry)
    if suspect:
        faults.append(
            JournalFault(
                name, suspect, "broken", "the chain is broken: this line is not what was written"
            )
        )
    if unfinished:
        faults.append(JournalFault(name, len(lines) + 1, "torn", "the last line was cut short"))
    return entries, faults


def _parse(line: bytes) -> JournalEntry | None:
    """The entry in a line, or None when it is not one or its hash does not fit its content.

    The hash is of the line without it; lines of older versions had their keys in another order than
    what was hashed.
    """
    body, seal = line[:-_HASH_BYTES] + b"}", line[-_HASH_BYTES:]
    try:
        if (
            seal[:9] == b',"hash":"'
            and seal[-2:] == b'"}'
            and hashlib.sha256(body).hexdigest().encode("ascii") == seal[9:-2]
        ):
            return replace(record_of_text(JournalEntry, body), hash=seal[9:-2].decode("ascii"))
        entry = record_of_text(JournalEntry, line)
        if entry.hash == _digest(entry):
            return entry
        return None
    except ValueError:
        return None


def _text(entry: JournalEntry) -> str:
    content = {name: value for name, value in asdict(entry).items() if name != "hash"}
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _digest(entry: JournalEntry) -> str:
    return hashlib.sha256(_text(entry).encode("utf-8")).hexdigest()


def _sealed(**content: Any) -> JournalEntry:
    return JournalEntry(**content, hash=_digest(JournalEntry(**content)))


def _line(entry: JournalEntry) -> str:
    return f'{_text(entry)[:-1]},"hash":"{entry.hash}"}}'


def _tail(descriptor: int) -> tuple[JournalEntry | None, bool]:
    """The last whole entry of the open file, and whether an unfinished line follows it."""
    size = os.fstat(descriptor).st_size
    length = min(size, _TAIL_BYTES)
    while True:
        content = os.pread(descriptor, length, size - length)
        lines = content.split(b"\n")
        is_torn = bool(lines.pop())
        if length == size:
            whole = lines
        else:
            whole = lines[1:]
        last = next(
            (entry for line in reversed(whole) if (entry := _parse(line)) is not None), None
        )
        if last is not None or length == size:
            return last, is_torn
        length = min(size, length * 4)


def _open(path: Path) -> int:
    return open_shared(path, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK)


def _open_sound(path: Path) -> int | None:
    """The open file; None where a folder, a pipe, a link in a circle or far too much lies at its
    path.
    """
    try:
        descriptor = _open(path)
    except OSError as error:
        if not is_damage(error):
            raise
        return None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST_BYTES:
        return descriptor
    os.close(descriptor)
    return None


def _lock(descriptor: int) -> bool:
    """Keep the machine's other writers out; False where the file system has no locks, or another
    keeps it too long.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK or time.monotonic() > deadline:
                return False
        time.sleep(0.002)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]

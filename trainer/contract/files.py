"""How the folders and files of a run directory are made: for the run's whole group, whatever the
umask is; and written: whole or not at all.

Anyone of the group must be able to stop the run, go on with it, and clean up. Standard library
only.

Files with a number are made by many hosts: claims on something shared, and versions of a file. Each
is finished beside its place and gets its name by a hard link: the file server lets exactly one of
many succeed, so no lock is needed, and none that a file system may lack is used. The highest number
fences off those below it: who slept while others went on finds out by it.
"""

from __future__ import annotations

import errno
import getpass
import json
import os
import pwd
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract import state_file
from trainer.contract.state_file import LARGEST_BYTES, content_of

_FOLDER_BITS = stat.S_IRWXG | stat.S_ISGID
_FILE_BITS = stat.S_IRGRP | stat.S_IWGRP


def make_shared(folder: Path) -> None:
    """Make a folder, and its missing parents, that the whole group may write to, whatever the umask
    is.

    Its setgid bit gives all that is made in it the folder's group, no matter who makes it. A folder
    that is there already keeps its rights. Raises OSError as the file system does.
    """
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        with suppress(PermissionError):  # another user was faster: it is theirs, and they share it
            share_folder(path)


def share_folder(folder: Path) -> None:
    """Open the caller's own folder to its group. Raises OSError."""
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | _FOLDER_BITS)


def open_shared(path: Path, flags: int) -> int:
    """`os.open` with a file that it makes readable and writable for the group. Raises OSError as
    `os.open` does.
    """
    descriptor = os.open(path, flags | os.O_CREAT, 0o664)
    try:
        share_file(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def share_file(descriptor: int) -> None:
    """Open a file to its group where it is the caller's own. Raises OSError."""
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & _FILE_BITS != _FILE_BITS:
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) | _FILE_BITS)


def write_atomically(path: Path, text: str, mode: int = 0o664) -> None:
    """Replace `path` by `text` in one step: written beside it, flushed to disk, renamed, by default
    group-writable.

    Raises OSError as the file system does (disk full, read-only, missing rights); the old file is
    then intact.
    """
    temporary = write_beside(path, text, mode)
    try:
        state_file.put_in_place(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_beside(path: Path, text: str, mode: int = 0o664) -> Path:
    """Write what is to become `path` into a hidden file beside it, flushed; returns that file.

    No one else can read it before it is whole and has its `mode`. Raises OSError as the file system
    does; nothing is then left.
    """
    make_shared(path.parent)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(mode)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object atomically (see `write_atomically`)."""
    write_atomically(path, json_text(value))


def json_text(value: Mapping[str, Any]) -> str:
    """One JSON object as our files hold it."""
    return json.dumps(value, indent=1, sort_keys=True, default=str) + "\n"


def write_unflushed(path: Path, value: Mapping[str, Any], pid: int) -> None:
    """Replace a small JSON file in one step, without waiting for the disk. `pid`: of the one
    process that writes it.

    Raises OSError as the file system does.
    """
    make_shared(path.parent)
    temporary = path.with_name(f".{path.name}.{pid}")
    with os.fdopen(
        open_shared(temporary, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8"
    ) as stream:
        stream.write(json.dumps(value))
    state_file.put_in_place(temporary, path)


def now() -> float:
    """Seconds since the epoch."""
    return time.time()


def host_name() -> str:
    """This node's name; the scheduler's own name for it where one machine plays many nodes."""
    return (
        os.environ.get("TR11_NODE_NAME")
        or os.environ.get("SLURMD_NODENAME")
        or socket.gethostname()
    )


def login_name() -> str:
    """The user that this process runs as, or the user's number where no name is known, as in some
    containers.
    """
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def user_of(number: int) -> str:
    """The name of a user, or the number where it has none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def append_line(path: Path, text: str) -> None:
    """Append a whole line, or several, in a single write: on a local disk writers never interleave
    inside one.

    A line that was cut before it, as on a full disk, is ended first. Raises OSError, also where a
    part did not fit.
    """
    make_shared(path.parent)
    # a pipe fails at once
    descriptor = open_shared(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    try:
        start = "\n" if _ends_cut(path, os.fstat(descriptor)) else ""
        data = f"{start}{text}\n".encode(errors="replace")
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, "no space left for the whole line", str(path))
    finally:
        os.close(descriptor)


def _ends_cut(path: Path, status: os.stat_result) -> bool:
    """Whether the last write ended inside a line. No, where that cannot be seen."""
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    with suppress(OSError), path.open("rb", buffering=0) as stream:
        stream.seek(status.st_size - 1)
        return stream.read(1) not in (b"\n", b"")
    return False


def file_system_time(folder: Path) -> tuple[float, float]:
    """This machine's time and the file system's, of one moment, by a file in `folder` that is gone
    when this returns.

    Raises OSError where none can be made.
    """
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
        probe = None
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        # network file systems have no files without names
        probe = folder / f".clock-{secrets.token_hex(6)}"
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
    try:
        before = time.time()
        os.write(descriptor, b".")
        os.fsync(descriptor)
        after = time.time()
        stamped = os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        if probe is not None:
            probe.unlink(missing_ok=True)
    return (stamped if before <= stamped <= after else (before + after) / 2), stamped


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last through a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some file systems flush names by themselves and say so like this
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def link_unless_taken(draft: Path, goal: Path) -> None:
    """Give a finished file its name unless the name is taken; by a rename where there are no hard
    links.
    """
    try:
        goal.hardlink_to(draft)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        draft.replace(goal)


_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


@dataclass
class NumberedFiles:
    """The files PREFIX NUMBER SUFFIX of one folder, numbers from 1 on with at least `digits`
    digits.

    Each method is one step; between two, anything may happen. Every method raises OSError as the
    file system does.
    """

    path: Path
    prefix: str = ""
    suffix: str = ".json"
    digits: int = 1

    def __post_init__(self) -> None:
        self._name = re.compile(
            rf"{re.escape(self.prefix)}(\d{{{self.digits},}}){re.escape(self.suffix)}"
        )

    def file(self, number: int) -> Path:
        """Where a number is, or would be."""
        return self.path / f"{self.prefix}{number:0{self.digits}d}{self.suffix}"

    def numbers(self) -> list[int]:
        """The numbers that are there, ascending."""
        try:
            names = os.listdir(self.path)  # noqa: PTH208  a name is enough
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in map(self._name.fullmatch, names) if match)

    def newest(self, most_bytes: int = LARGEST_BYTES) -> tuple[int, bytes]:
        """The highest number and what its file holds; (0, b"") when there is none."""
        for _ in range(10):
            number = max(self.numbers(), default=0)
            if not number:
                return 0, b""
            try:
                return number, content_of(self.file(number), most_bytes)
            except FileNotFoundError:  # others were made since, and this one was removed
                continue
        raise OSError(errno.EAGAIN, "the claims change all the time", str(self.path))

    def make(
        self, number: int, content: bytes, *, is_flushed: bool = True, is_signed: bool = True
    ) -> bool:
        """Make a number; False when another has. The folder is made where there is none.

        `is_signed`: no one else writes the same content, and where the file system has no hard
        links the file may be seen unfinished; else that is an error. `is_flushed`: it survives a
        power cut.
        """
        target = self.file(number)
        make_shared(self.path)
        draft = self.path / f".{target.name}.{secrets.token_hex(6)}"
        try:
            with draft.open("xb") as stream:
                stream.write(content)
                if is_flushed:
                    stream.flush()
                    os.fsync(stream.fileno())
            draft.chmod(0o664)
            os.link(draft, target)
        except FileExistsError:
            # Over NFS the answer to a link that succeeded can be lost, and the repetition fails:
            # look whose it is.
            return draft.stat().st_nlink > 1 or (is_signed and content_of(target) == content)
        except OSError as error:
            if error.errno not in _NO_LINKS or not is_signed:
                raise
            return self._make_without_links(target, content)
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _make_without_links(self, target: Path, content: bytes) -> bool:
        try:
            descriptor = open_shared(target, os.O_WRONLY | os.O_EXCL)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        return True

    def is_newest(self, number: int, surely: bool = True) -> bool:
        """Whether the number is there and the highest.

        `surely`: also against what an NFS client remembers of the folder, which a change made by
        this node corrects.
        """
        if surely:
            refresh(self.path)
        return max(self.numbers(), default=0) == number

    def age(self, number: int) -> float:
        """Seconds since the file was written, by the clock of the file server, which stamps a new
        file now.
        """
        with _probe(self.path) as probe:
            return probe.stat().st_mtime - self.file(number).stat().st_mtime

    def clear(self, kept: int) -> None:
        """Remove all but the highest ones. What cannot be removed harms no one: the highest counts."""
        for number in self.numbers()[:-kept]:
            # another user's, in a folder with the sticky bit, or a folder of that name
            with suppress(OSError):
                self.file(number).unlink(missing_ok=True)


def refresh(folder: Path) -> None:
    """Make an NFS client forget what it remembers of a folder: a change that it makes itself does
    that.
    """
    # a full disk, or not ours to write to: then what is listed must do
    with suppress(OSError), _probe(folder):
        pass


@contextmanager
def _probe(folder: Path) -> Iterator[Path]:
    """A new file that is there for a moment."""
    probe = folder / f".probe-{secrets.token_hex(6)}"
    try:
        probe.touch()
        yield probe
    finally:
        probe.unlink(missing_ok=True)

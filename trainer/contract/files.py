"""How the folders and files of a run directory are made: for the run's whole group, whatever the
umask is; and written: whole or not at all.

Anyone of the group must be able to stop the run, go on with it, and clean up. Standard library
only.
"""

from __future__ import annotations

import errno
import getpass
import json
import os
import pwd
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.contract import state_file

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
    write_atomically(path, json.dumps(value, indent=1, sort_keys=True, default=str) + "\n")


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

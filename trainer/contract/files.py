"""How the files of a run directory are written: whole or not at all."""

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
from trainer.contract.sharing import make_shared, open_shared


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

"""Who listens on a TCP port of this host: what is seen of it without any right."""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from pathlib import Path

import psutil

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"  # the kernel's number of that state


def holder_of(port: int) -> str:
    """`process 77 (nc) of ana`: who listens on `port`. "" where no one does, or the system does not tell.

    Of a process of another user only the user is seen.
    """
    uid = next(_listeners(port), None)
    if uid is None:
        return ""
    process = _process(port)
    who = "a process" if process is None else f"process {process.pid} ({_name(process)})"
    return f"{who} of {_user(uid)}"


def _listeners(port: int) -> Iterator[int]:
    """The users who listen on it, by the kernel's tables (proc(5))."""
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield int(fields[7])


def _process(port: int) -> psutil.Process | None:
    try:
        for one in psutil.net_connections(kind="tcp"):
            is_listener = one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
            if is_listener and one.pid is not None:
                return psutil.Process(one.pid)
    except (psutil.Error, OSError):
        return None
    return None


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "gone since"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"

"""Who is who among processes, for ever: marks that outlive a reuse of the number, and whether such
a one still runs.

psutil is imported where /proc does not tell: `tr11 status` looks at marks alone, and that import is
2 % of its start.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from tr11ops.cluster.local_records import ProcessMark


@cache
def boot_mark() -> str:
    """What tells this boot of this machine from every other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return f"{os.uname().nodename}@{psutil.boot_time():.0f}"


def start_mark(pid: int) -> str | None:
    """When a process started, in a form that clock changes leave alone; None if there is no such
    process.
    """
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if fields[0] == b"Z":
            return None
        return fields[19].decode()
    import psutil

    try:
        return repr(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def mark(pid: int) -> ProcessMark:
    """Name a living process for ever. A process that is gone gets a mark that matches nothing."""
    return ProcessMark(pid, start_mark(pid) or "gone", boot_mark())


def is_alive(process: ProcessMark | None) -> bool:
    """Does exactly this process still run, on this machine, since this boot?"""
    return (
        process is not None
        and process.boot == boot_mark()
        and start_mark(process.pid) == process.start
    )

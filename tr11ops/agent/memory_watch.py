"""Watches the memory of a node while its workers run, and what they leave in /dev/shm.

A word before the kernel ends a worker for want of memory is worth more than the worker's silence
after it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tr11ops.base.units import size
from tr11ops.health.base import SHARED_MEMORY, mapped, own_pids
from tr11ops.health.host import available

SAMPLE_SECONDS = 2.0
# reading every worker's size and maps costs more than reading two numbers of the node
TREE_SECONDS = 10.0
LOW_SHARE = 0.05
ENOUGH_SHARE = 0.10
LOW_BYTES = 1 << 30  # below this much it is low, however small the share
_KILOBYTES = re.compile(r"^(VmRSS|VmHWM):\s+(\d+) kB$", re.MULTILINE)
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass
class MemoryWatch:
    """The lowest and highest values since the workers started. `say` gets one line when memory runs
    out.

    `sample` is called often; it looks every two seconds. Sizes in bytes.
    """

    node: str
    say: Callable[[str], None]
    meminfo: Path = Path("/proc/meminfo")
    shared_memory: Path = SHARED_MEMORY
    vmstat: Path = Path("/proc/vmstat")
    lowest_available: int | None = None
    total: int = 0
    lowest_shared_memory: int | None = None
    peak: int = 0
    peak_worker: int = 0
    warnings: list[str] = field(default_factory=list)
    _low: set[str] = field(default_factory=set)
    _segments: dict[str, int] = field(default_factory=dict)  # name -> inode
    _kills_before: int | None = field(default=None, init=False)
    _next_sample: float = 0.0
    _next_tree: float = 0.0

    def __post_init__(self) -> None:
        self._kills_before = self._count_kills()

    def sample(self, pid: int) -> bool:
        """Look, when it is time to; `pid` is the workers' launcher. True when a new warning was
        said.
        """
        now = time.monotonic()
        if now < self._next_sample:
            return False
        self._next_sample = now + SAMPLE_SECONDS
        said = len(self.warnings)
        if now >= self._next_tree:
            self._next_tree = now + TREE_SECONDS
            self.look_at_tree(pid)
        # a node that does not tell is trained on all the same
        with suppress(OSError, KeyError, ValueError):
            free, self.total = self._available()
            self.lowest_available = min(
                free, self.lowest_available if self.lowest_available is not None else free
            )
            self._judge("memory", free, self.total, pid)
        with suppress(OSError):
            status = os.statvfs(self.shared_memory)
            free = status.f_bavail * status.f_frsize
            room = status.f_blocks * status.f_frsize
            lowest = self.lowest_shared_memory
            if lowest is None:
                self.lowest_shared_memory = free
            else:
                self.lowest_shared_memory = min(free, lowest)
            self._judge(str(self.shared_memory), free, room, pid)
        return len(self.warnings) > said

    def look_at_tree(self, pid: int) -> None:
        """The sizes of the launcher's descendants now, and the files in /dev/shm that they use."""
        sizes = dict(_sizes(pid))
        self.peak = max(self.peak, sum(resident for resident, _ in sizes.values()))
        self.peak_worker = max([self.peak_worker, *(highest for _, highest in sizes.values())])
        for name in mapped(sizes):
            with suppress(OSError):
                status = (self.shared_memory / name).stat()
                if status.st_uid == os.geteuid():
                    self._segments[name] = status.st_ino

    def sweep(self) -> tuple[str, ...]:
        """Remove what the workers, now ended, left in /dev/shm: by exact name, and only the very
        files they used.
        """
        removed = []
        used = frozenset[str]()
        if any((self.shared_memory / name).exists() for name in self._segments):
            used = mapped(own_pids())
        for name, inode in sorted(self._segments.items()):
            path = self.shared_memory / name
            with suppress(OSError):
                if name not in used and path.stat().st_ino == inode:
                    path.unlink()
                    removed.append(name)
        return tuple(removed)

    def record(self) -> dict[str, Any]:
        """For the node's record."""
        return {
            "peak_bytes": self.peak,
            "peak_worker_bytes": self.peak_worker,
            "lowest_available_bytes": self.lowest_available,
            "total_bytes": self.total,
            "lowest_shared_memory_bytes": self.lowest_shared_memory,
            "warnings": list(self.warnings),
            "oom_kills": self._oom_kills(),
        }

    def _oom_kills(self) -> int | None:
        """How many processes of this node the kernel has killed for want of memory since the
        workers started.
        """
        now = self._count_kills()
        if now is None or self._kills_before is None:
            return None
        return now - self._kills_before

    def _count_kills(self) -> int | None:
        """All that it ever killed; None where it does not tell."""
        with suppress(OSError, ValueError):
            found = _KILLS.search(self.vmstat.read_text(encoding="ascii"))
            if found:
                return int(found[1])
            return None
        return None

    def _available(self) -> tuple[int, int]:
        free, total = available(self.meminfo.read_text(encoding="ascii"))
        limited = _control_group()
        if limited is not None:
            free = min(free, limited[0])
            total = min(total, limited[1])
        return free, total

    def _judge(self, what: str, free: int, total: int, pid: int) -> None:
        """Say it once when it becomes low, and again only after it has recovered."""
        if free > ENOUGH_SHARE * total and free > 2 * min(LOW_BYTES, total // 10):
            self._low.discard(what)
        if what in self._low or free > max(LOW_SHARE * total, min(LOW_BYTES, total // 10)):
            return
        self._low.add(what)
        largest = max(_sizes(pid), key=lambda entry: entry[1][0], default=None)
        whose = ""
        if largest:
            whose = f"; the largest worker process is {largest[0]} with {size(largest[1][0])}"
        line = f"{self.node}: {what} runs out: {size(free)} of {size(total)} left{whose}"
        self.warnings.append(line)
        self.say(f"tr11: {line}")


@dataclass
class WorkerWatch:
    """When each worker was gone: the launcher tells of it only when it has ended the others, half a
    minute later.

    `failures`: how each failed worker ended, as the launcher says, at the moment at which it was
    first missed.
    """

    failures: list[dict[str, Any]] = field(default_factory=list)
    _living: set[int] = field(default_factory=set)
    _gone: dict[int, float] = field(default_factory=dict)

    def look(self, pid: int) -> None:
        """Notice which of the launcher's children have gone since the last look."""
        now = set(_children(pid))
        for worker in self._living - now:
            self._gone.setdefault(worker, time.time())
        self._living = now

    def told(self, rank: int, pid: int, how: str) -> None:
        """Keep what the launcher says of one failed worker."""
        self.failures.append(
            {"rank": rank, "pid": pid, "how": how, "time": self._gone.get(pid, time.time())}
        )


def _sizes(pid: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """(pid, (resident, highest resident)) of a process's descendants, in bytes."""
    for child in descendants(pid):
        with suppress(OSError):
            found = dict(
                _KILOBYTES.findall(Path(f"/proc/{child}/status").read_text(encoding="utf-8"))
            )
            yield child, (1024 * int(found.get("VmRSS", 0)), 1024 * int(found.get("VmHWM", 0)))


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, without asking every process of the machine who its parent is (where
    the kernel can).
    """
    if not Path("/proc/thread-self/children").exists():
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.scandir(f"/proc/{pid}/task"):
            with suppress(OSError):
                text = Path(thread.path, "children").read_text(encoding="ascii")
                found += [int(word) for word in text.split()]
    return found


def _control_group() -> tuple[int, int] | None:
    """(still available, limit) in bytes of this process's control group (version 2); None where
    there is no limit.
    """
    with suppress(OSError, ValueError, KeyError):
        place = Path("/proc/self/cgroup").read_text(encoding="utf-8").strip().rpartition("0::")[2]
        folder = Path("/sys/fs/cgroup" + place)
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        statistics = dict(
            line.split()
            for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        )
        current = int((folder / "memory.current").read_text(encoding="ascii"))
        return limit - (current - int(statistics["inactive_file"])), limit
    return None

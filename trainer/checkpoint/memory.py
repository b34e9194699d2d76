"""How much host memory is left for copies of checkpoints: of the node, and of the job's own limit on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer.contract.record import Record
from trainer.contract.units import size

USABLE = 0.8  # of what is available: the data loader and the file system go on needing some


class MemoryNeed(Record):
    """What one rank needs beyond what it has, in bytes, and what its host has left."""

    host: str
    needed: int
    available: int


def shortage(needs: Iterable[MemoryNeed]) -> str | None:
    """Why the ranks' copies do not fit into their hosts' memory, naming the first such host; None when they do."""
    wanted: dict[str, int] = {}
    available: dict[str, int] = {}
    for need in needs:
        wanted[need.host] = wanted.get(need.host, 0) + need.needed
        available[need.host] = min(need.available, available.get(need.host, need.available))
    for host, total in wanted.items():
        usable = int(available[host] * USABLE)
        if total > usable:
            return f"{host} would need {size(total)} of memory for copies and can spare {size(usable)}"
    return None


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still use: the least of the node's and of every enclosing cgroup's (v2).

    Memory that the kernel can reclaim at once (cached files) counts as available. Raises OSError, ValueError or
    KeyError when the kernel does not say.
    """
    node = _fields(proc / "meminfo")["MemAvailable:"] * 1024
    return min([node, *_cgroup_rooms(proc, cgroups)])


def _cgroup_rooms(proc: Path, cgroups: Path) -> Iterable[int]:
    lines = (proc / "self" / "cgroup").read_text(encoding="ascii").splitlines()
    unified = next((line[3:] for line in lines if line.startswith("0::")), None)
    if unified is None:
        return
    group = cgroups / unified.lstrip("/")
    for place in (group, *group.parents):
        if not place.is_relative_to(cgroups):
            return
        limit = _text(place / "memory.max")
        if limit in {"", "max"}:
            continue
        statistics = _fields(place / "memory.stat")
        reclaimable = statistics.get("inactive_file", 0) + statistics.get("active_file", 0)
        yield max(0, int(limit) - int(_text(place / "memory.current")) + reclaimable)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""


def _fields(path: Path) -> Mapping[str, int]:
    """A file of lines "name number ..."."""
    pairs = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1}

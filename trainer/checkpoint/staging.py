"""Host memory for the copy of a checkpoint, page-locked where it is copied to from a GPU.

Torch's own pinned memory is rounded up to a power of two (33 GiB become 64) and kept when it is
freed. So plain memory of the very size is registered with the driver, once: that takes half a
second a GiB, the copy itself 0.02.

Copies from a GPU have a stream of their own, beside the computation. What they read may change once
`hold` was called: the GPU then waits for them by itself, and the host does not.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.files import aligned_buffer
from trainer.contract.record import Record
from trainer.contract.units import size


class Staging:
    """`size` bytes in `memory`, aligned for files. `on_gpu`: what is copied lies on this thread's
    GPU.

    Raises MemoryError or RuntimeError when there is no such memory, or the driver does not lock it.
    """

    def __init__(self, size: int, on_gpu: bool):
        self.memory = aligned_buffer(size)
        self._release: weakref.finalize | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        if on_gpu and size:
            driver = torch.cuda.cudart()
            _lock(driver, self.memory)
            self._release = weakref.finalize(self, _unlock, driver, self.memory)
            self._release.atexit = False  # the process takes its locks along
            self._stream = torch.cuda.Stream()

    @contextmanager
    def copying(self) -> Generator[None]:
        """Copies from a GPU in the block see what was computed before it, and run beside what comes
        behind it.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
            self._copied = self._stream.record_event()

    def hold(self) -> None:
        """What is given to the GPU from here on begins when all copies have been made."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def settle(self) -> None:
        """Wait until all that was copied has arrived: before anyone reads the memory."""
        if self._copied is not None:
            self._copied.synchronize()

    def release(self) -> None:
        """Unlock the memory; it is freed with its last view."""
        with suppress(RuntimeError):  # a GPU that has failed copies no more
            self.settle()
        if self._release is not None:
            self._release()


def ready_staging(size: int, gpu: int | None) -> Staging:
    """A Staging whose pages are there, so that the first copy needs not wait for them, for what
    lies on that GPU.
    """
    if gpu is not None:
        torch.cuda.set_device(gpu)  # of this thread, which would lock the memory for the first one
        return Staging(size, on_gpu=True)
    staging = Staging(size, on_gpu=False)
    staging.memory.numpy()[:: mmap.PAGESIZE] = 0
    return staging


def _lock(driver: Any, memory: Tensor) -> None:
    status = driver.cudaHostRegister(memory.data_ptr(), len(memory), 0)
    if int(status) != 0:
        # the refusal itself: it stays pending, and torch raises it at its next kernel
        with suppress(RuntimeError):
            _launch()
        raise RuntimeError(
            f"the driver locks no {len(memory):,} bytes of host memory (cudaHostRegister: {status})"
        )


def _launch() -> None:
    torch.ones((), device=torch.device("cuda", torch.cuda.current_device()))


def _unlock(driver: Any, memory: Tensor) -> None:
    driver.cudaHostUnregister(memory.data_ptr())


USABLE = 0.8  # of what is available: the data loader and the file system go on needing some


class MemoryNeed(Record):
    """What one rank needs beyond what it has, in bytes, and what its host has left."""

    host: str
    needed: int
    available: int


def shortage(needs: Iterable[MemoryNeed]) -> str | None:
    """Why the ranks' copies do not fit into their hosts' memory, naming the first such host; None
    when they do.
    """
    wanted: dict[str, int] = {}
    available: dict[str, int] = {}
    for need in needs:
        wanted[need.host] = wanted.get(need.host, 0) + need.needed
        available[need.host] = min(need.available, available.get(need.host, need.available))
    for host, total in wanted.items():
        usable = int(available[host] * USABLE)
        if total > usable:
            return (
                f"{host} would need {size(total)} of memory for copies and can spare {size(usable)}"
            )
    return None


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still use: the least of the node's and of every enclosing
    cgroup's (v2).

    Memory that the kernel can reclaim at once (cached files) counts as available. Raises OSError,
    ValueError or KeyError when the kernel does not say.
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

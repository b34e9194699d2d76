"""All-reduces between two nodes at a time, each node with several others: which node, or link, talks slowly.

The nodes meet in a store on the node of rank 0. Each turn has other pairs, as in a round-robin tournament, so that a
good node is not judged by a bad partner alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

TURNS = 3
PATIENCE = timedelta(seconds=60)  # with a partner
MEET_SECONDS = 120.0  # until the others are there: file systems show a new file late
LOOK_SECONDS = 0.1
REDUCED_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}


def partner(rank: int, size: int, turn: int) -> int | None:
    """With whom `rank` is paired in a turn, by the circle method; None who sits out (of an odd number, one a turn)."""
    even = size + size % 2
    fixed = even - 1
    if rank == fixed:
        other = turn % fixed
    else:
        other = (2 * turn - rank) % fixed
        if other == rank:
            other = fixed
    return other if other < size else None


@dataclass
class Meeting:
    """The store in which the nodes meet, and who has come."""

    rank: int
    size: int
    folder: Path
    store: TCPStore | None = None

    @classmethod
    def open(cls, rank: int, size: int, folder: Path) -> Meeting:
        """Rank 0 opens the store before all else, and says in `folder` where it is. Raises OSError, RuntimeError."""
        meeting = cls(rank, size, folder)
        if rank == 0:
            address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
            meeting.store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
            draft = folder / ".store"
            draft.write_text(f"{address} {meeting.store.port}")
            draft.rename(meeting.place)
        return meeting

    @property
    def place(self) -> Path:
        return self.folder / "store"

    def gather(self) -> frozenset[int]:
        """Say that this rank is here, and wait for the others; who came in time. Raises OSError, RuntimeError."""
        deadline = time.monotonic() + MEET_SECONDS
        while self.store is None:
            if self.place.exists():
                address, port = self.place.read_text().split()
                self.store = TCPStore(address, int(port), is_master=False, timeout=PATIENCE)
            elif time.monotonic() > deadline:
                raise RuntimeError(f"no all-reduces: the first node opened no store within {MEET_SECONDS:g} s")
            else:
                time.sleep(LOOK_SECONDS)
        self.store.set(f"here/{self.rank}", "")
        everyone = [f"here/{rank}" for rank in range(self.size)]
        while not self.store.check(everyone) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return self._present()

    def leave(self) -> None:
        """Rank 0 stays until the others are done with the store, or have had the time to be."""
        if self.store is None:
            return
        with suppress(RuntimeError):  # the store is gone: so is its node
            gone = self.store.add("left", 1)
            deadline = time.monotonic() + MEET_SECONDS + TURNS * PATIENCE.total_seconds()
            while self.rank == 0 and gone < len(self._present() | {0}) and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
                gone = self.store.add("left", 0)

    def _present(self) -> frozenset[int]:
        assert self.store is not None
        return frozenset(rank for rank in range(self.size) if self.store.check([f"here/{rank}"]))


def all_reduces(
    meeting: Meeting, devices: Sequence[torch.device], repeats: int, seconds: float
) -> Iterator[tuple[int, list[float]]]:
    """With each partner its rank and bytes per second of each sample, on the slowest of the devices.

    A pair that fails says nothing, and the next one is tried: a partner that died must not cost this node its samples.
    Raises RuntimeError where every pair has failed.
    """
    here, failed, done = meeting.gather(), "", 0
    for turn in range(min(TURNS, meeting.size - 1 + meeting.size % 2)):
        other = partner(meeting.rank, meeting.size, turn)
        if other is None or other not in here:
            continue
        try:
            found = [
                _samples(meeting, other, f"{turn}/{index}", device=device, repeats=repeats, seconds=seconds)
                for index, device in enumerate(devices)
            ]
        except RuntimeError as error:
            failed = f"all-reduce with rank {other}: {error}"
            continue
        done += 1
        yield other, min(found, key=median)
    if failed and not done:
        raise RuntimeError(failed)


def _samples(
    meeting: Meeting, other: int, name: str, device: torch.device, repeats: int, seconds: float
) -> list[float]:
    """Bytes per second that an all-reduce of two takes in, each sample of about so many seconds."""
    assert meeting.store is not None
    low, high = sorted((meeting.rank, other))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = PrefixStore(f"{name}/{low}-{high}", meeting.store)
    backend, rank = "nccl" if device.type == "cuda" else "gloo", int(meeting.rank == high)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=PATIENCE)
    try:
        value = torch.zeros(REDUCED_BYTES[device.type] // 4, device=device)
        _seconds(value, 1)  # connections are made
        count = torch.tensor([max(1, int(seconds / _seconds(value, 1)))], device=device)
        distributed.all_reduce(count, distributed.ReduceOp.MIN)  # both must do equally many
        return [value.numel() * 4 * int(count) / _seconds(value, int(count)) for _ in range(repeats)]
    finally:
        distributed.destroy_process_group()


def _seconds(value: torch.Tensor, count: int) -> float:
    """Seconds of so many all-reduces of this tensor, begun together."""
    distributed.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        distributed.all_reduce(value)
    if value.is_cuda:
        torch.cuda.synchronize(value.device)
    return max(time.perf_counter() - begun, 1e-9)

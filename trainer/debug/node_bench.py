"""How fast does this node compute, copy, talk and write? Short measurements, for nodes to be
compared by.

    python -m trainer.debug.node_bench --rank 0 --size 1

Each line that it prints is one sample, `NAME VALUE UNIT`, and a larger value is a faster node.
`NAME@PART` is one of several parts: `gpu-copy@3` of its GPU 3, `all-reduce@7` with the node of rank
7. First every number is checked as in `group_probe`. Exit status 1, and why in one line, where one
comes out wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainer.contract.errors import ProbeFailure
from trainer.contract.record import Record
from trainer.contract.units import shortened
from trainer.debug.group_probe import compute, remember

# All-reduces between two nodes at a time, each node with several others: which node, or link, talks
# slowly.
#
# The nodes meet in a store on the node of rank 0. Each turn has other pairs, as in a round-robin
# tournament, so that a good node is not judged by a bad partner alone.

TURNS = 3
PATIENCE = timedelta(seconds=60)  # with a partner
MEET_SECONDS = 120.0  # until the others are there: file systems show a new file late
LOOK_SECONDS = 0.1
REDUCED_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}


def partner(rank: int, size: int, turn: int) -> int | None:
    """With whom `rank` is paired in a turn, by the circle method; None who sits out (of an odd
    number, one a turn).
    """
    even = size + size % 2
    fixed = even - 1
    if rank == fixed:
        other = turn % fixed
    else:
        other = (2 * turn - rank) % fixed
        if other == rank:
            other = fixed
    if other < size:
        return other
    return None


@dataclass
class Meeting:
    """The store in which the nodes meet, and who has come."""

    rank: int
    size: int
    folder: Path
    store: TCPStore | None = None

    @classmethod
    def open(cls, rank: int, size: int, folder: Path) -> Meeting:
        """Rank 0 opens the store before all else, and says in `folder` where it is. Raises OSError,
        RuntimeError.
        """
        meeting = cls(rank, size, folder)
        if rank == 0:
            address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
            meeting.store = TCPStore(
                address, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE
            )
            draft = folder / ".store"
            draft.write_text(f"{address} {meeting.store.port}")
            draft.rename(meeting.place)
        return meeting

    @property
    def place(self) -> Path:
        return self.folder / "store"

    def gather(self) -> frozenset[int]:
        """Say that this rank is here, and wait for the others; who came in time. Raises OSError,
        RuntimeError.
        """
        deadline = time.monotonic() + MEET_SECONDS
        while self.store is None:
            if self.place.exists():
                address, port = self.place.read_text().split()
                self.store = TCPStore(address, int(port), is_master=False, timeout=PATIENCE)
            elif time.monotonic() > deadline:
                raise RuntimeError(
                    f"no all-reduces: the first node opened no store within {MEET_SECONDS:g} s"
                )
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
            while (
                self.rank == 0 and gone < len(self._present() | {0}) and time.monotonic() < deadline
            ):
                time.sleep(LOOK_SECONDS)
                gone = self.store.add("left", 0)

    def _present(self) -> frozenset[int]:
        assert self.store is not None
        return frozenset(rank for rank in range(self.size) if self.store.check([f"here/{rank}"]))


def all_reduces(
    meeting: Meeting, devices: Sequence[torch.device], repeats: int, seconds: float
) -> Iterator[tuple[int, list[float]]]:
    """With each partner its rank and bytes per second of each sample, on the slowest of the
    devices.

    A pair that fails says nothing, and the next one is tried: a partner that died must not cost
    this node its samples. Raises RuntimeError where every pair has failed.
    """
    here, failed, done = meeting.gather(), "", 0
    for turn in range(min(TURNS, meeting.size - 1 + meeting.size % 2)):
        other = partner(meeting.rank, meeting.size, turn)
        if other is None or other not in here:
            continue
        try:
            found = [
                _samples(
                    meeting,
                    other,
                    f"{turn}/{index}",
                    device=device,
                    repeats=repeats,
                    seconds=seconds,
                )
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
        return [
            value.numel() * 4 * int(count) / _seconds(value, int(count)) for _ in range(repeats)
        ]
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


# Sides of the matrices: large enough to fill the device, small enough that a sample has several
# products. A processor without bfloat16 instructions is a hundred times slower in it.
SIDES = {("cpu", torch.float32): 512, ("cpu", torch.bfloat16): 256, ("cuda", torch.float32): 4096}
SIDES["cuda", torch.bfloat16] = 8192
SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
COPIED_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # beyond what caches hold
WRITTEN_BYTES = 64 << 20


class ProbeFigure(Record):
    """`work` may return before it is done; `wait` does not. `amount`: what one `work` does, in
    `unit` times seconds.
    """

    name: str
    unit: str
    amount: float
    work: Callable[[], object]
    wait: Callable[[], object]

    def speed(self, seconds: float) -> float:
        """One sample: so much per second, over at least so many seconds and once."""
        begun, done = time.perf_counter(), 0
        while True:
            self.work()
            self.wait()
            done += 1
            took = time.perf_counter() - begun
            if took >= seconds and took > 0:
                return self.amount * done / took


def main(arguments: Sequence[str]) -> int:
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices = [torch.device("cpu"), *gpus]
    say(f"hardware {_hardware(gpus)}")
    meeting = None
    if asked.size > 1 and asked.meet:
        meeting = Meeting.open(asked.rank, asked.size, Path(asked.meet))
    try:
        for device in devices:
            compute(device)
            remember(device)
        with _measurements(devices, asked.disk, asked.rank) as measurements:
            # in turns: what disturbs a moment spoils one sample of each
            for turn in range(asked.repeats + 1):
                for one in measurements:
                    speed = one.speed(asked.seconds)
                    if turn > 0:  # in the first one kernels are chosen and memory is first used
                        say(f"{one.name} {speed:.6g} {one.unit}")
        if meeting is not None:
            for other, values in all_reduces(
                meeting, gpus or devices, asked.repeats, asked.seconds
            ):
                for value in values:
                    say(f"all-reduce@{other} {value:.6g} B/s")
    except (ProbeFailure, RuntimeError, OSError) as error:
        say(shortened(" ".join(str(error).split()), 300))
        return 1
    finally:
        if meeting is not None:
            meeting.leave()
    return 0


def say(line: str) -> None:
    """Each line at once: of a node that hangs later, what it said before counts."""
    print(line, flush=True)


@contextmanager
def _measurements(
    devices: Sequence[torch.device], disk: str, rank: int
) -> Iterator[list[ProbeFigure]]:
    """All of them, with what they need at hand. Raises OSError where the disk's folder cannot be
    written.
    """
    found = [one for device in devices for one in (*_products(device), _copies(device))]
    if not disk:
        yield found
        return
    with _disk_writes(Path(disk), rank) as writes:
        yield [*found, writes]


@contextmanager
def _disk_writes(folder: Path, rank: int) -> Iterator[ProbeFigure]:
    """Bytes written to a file in `folder` and flushed to the disk. Raises OSError."""
    path = folder / f".tr11-bench-{rank}-{os.getpid()}"
    block = os.urandom(WRITTEN_BYTES)  # a file system may compress what repeats
    number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:

        def work() -> None:
            done = 0
            while done < len(block):
                done += os.pwrite(number, block[done:], done)

        yield ProbeFigure("disk-write", "B/s", len(block), work=work, wait=lambda: os.fsync(number))
    finally:
        os.close(number)
        path.unlink()


def _products(device: torch.device) -> Iterator[ProbeFigure]:
    """Square matrix products of each type: 2 n^3 operations for n rows."""
    for dtype in (torch.float32, torch.bfloat16):
        side = SIDES[device.type, dtype]
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        work = partial(
            torch.mm, left, right, out=torch.empty(side, side, device=device, dtype=dtype)
        )
        yield ProbeFigure(
            _name(device, SHORT_NAMES[dtype]),
            "FLOP/s",
            2.0 * side**3,
            work=work,
            wait=_waiting(device),
        )


def _copies(device: torch.device) -> ProbeFigure:
    """Copies in memory: each byte is read once and written once, and counts twice."""
    source = torch.ones(COPIED_BYTES[device.type] // 4, device=device)
    work = partial(torch.empty_like(source).copy_, source)
    return ProbeFigure(
        _name(device, "copy"), "B/s", 8.0 * source.numel(), work=work, wait=_waiting(device)
    )


def _name(device: torch.device, what: str) -> str:
    if device.type == "cpu":
        return f"cpu-{what}"
    return f"gpu-{what}@{device.index}"


def _waiting(device: torch.device) -> Callable[[], object]:
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def _hardware(gpus: Sequence[torch.device]) -> str:
    """What nodes must have in common to be compared."""
    models = sorted({torch.cuda.get_device_name(gpu) for gpu in gpus})
    processor = "processor"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    of_processor = f"{torch.get_num_threads()} x {processor}"
    if gpus:
        return f"{len(gpus)} x {', '.join(models)}; {of_processor}"
    return of_processor


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Samples of how fast this node is, one a line: NAME VALUE UNIT."
    )
    parser.add_argument(
        "--rank", type=int, default=0, help="of this node among those that are measured"
    )
    parser.add_argument("--size", type=int, default=1, help="how many they are")
    parser.add_argument(
        "--meet", default="", help="folder that all of them see, to find each other for all-reduces"
    )
    parser.add_argument(
        "--disk", default="", help="folder of this node to write in; else nothing is written"
    )
    parser.add_argument("--repeats", type=int, default=5, help="samples of each measurement")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a sample, at least")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

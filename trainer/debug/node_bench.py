"""How fast does this node compute, copy, talk and write? Short measurements, for nodes to be compared by.

    python -m trainer.debug.node_bench --rank 0 --size 1

Each line that it prints is one sample, `NAME VALUE UNIT`, and a larger value is a faster node. `NAME@PART` is one of
several parts: `gpu-copy@3` of its GPU 3, `all-reduce@7` with the node of rank 7. First every number is checked as in
`group_probe`. Exit status 1, and why in one line, where one comes out wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from trainer.contract.errors import ProbeFailure
from trainer.contract.record import Record
from trainer.debug.group_probe import compute, remember
from trainer.debug.pair_reduce import Meeting, all_reduces

# Sides of the matrices: large enough to fill the device, small enough that a sample has several products. A processor
# without bfloat16 instructions is a hundred times slower in it.
SIDES = {("cpu", torch.float32): 512, ("cpu", torch.bfloat16): 256, ("cuda", torch.float32): 4096}
SIDES["cuda", torch.bfloat16] = 8192
SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
COPIED_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # beyond what caches hold
WRITTEN_BYTES = 64 << 20


class ProbeFigure(Record):
    """`work` may return before it is done; `wait` does not. `amount`: what one `work` does, in `unit` times seconds."""

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
    meeting = Meeting.open(asked.rank, asked.size, Path(asked.meet)) if asked.size > 1 and asked.meet else None
    try:
        for device in devices:
            compute(device)
            remember(device)
        with _measurements(devices, asked.disk, asked.rank) as measurements:
            for turn in range(asked.repeats + 1):  # in turns: what disturbs a moment spoils one sample of each
                for one in measurements:
                    speed = one.speed(asked.seconds)
                    if turn > 0:  # in the first one kernels are chosen and memory is first used
                        say(f"{one.name} {speed:.6g} {one.unit}")
        if meeting is not None:
            for other, values in all_reduces(meeting, gpus or devices, asked.repeats, asked.seconds):
                for value in values:
                    say(f"all-reduce@{other} {value:.6g} B/s")
    except (ProbeFailure, RuntimeError, OSError) as error:
        say(" ".join(str(error).split())[:300])
        return 1
    finally:
        if meeting is not None:
            meeting.leave()
    return 0


def say(line: str) -> None:
    """Each line at once: of a node that hangs later, what it said before counts."""
    print(line, flush=True)


@contextmanager
def _measurements(devices: Sequence[torch.device], disk: str, rank: int) -> Iterator[list[ProbeFigure]]:
    """All of them, with what they need at hand. Raises OSError where the disk's folder cannot be written."""
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
        work = partial(torch.mm, left, right, out=torch.empty(side, side, device=device, dtype=dtype))
        yield ProbeFigure(_name(device, SHORT_NAMES[dtype]), "FLOP/s", 2.0 * side**3, work=work, wait=_waiting(device))


def _copies(device: torch.device) -> ProbeFigure:
    """Copies in memory: each byte is read once and written once, and counts twice."""
    source = torch.ones(COPIED_BYTES[device.type] // 4, device=device)
    work = partial(torch.empty_like(source).copy_, source)
    return ProbeFigure(_name(device, "copy"), "B/s", 8.0 * source.numel(), work=work, wait=_waiting(device))


def _name(device: torch.device, what: str) -> str:
    return f"cpu-{what}" if device.type == "cpu" else f"gpu-{what}@{device.index}"


def _waiting(device: torch.device) -> Callable[[], object]:
    return (lambda: None) if device.type == "cpu" else (lambda: torch.cuda.synchronize(device))


def _hardware(gpus: Sequence[torch.device]) -> str:
    """What nodes must have in common to be compared."""
    models = sorted({torch.cuda.get_device_name(gpu) for gpu in gpus})
    processor = "processor"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    of_processor = f"{torch.get_num_threads()} x {processor}"
    return f"{len(gpus)} x {', '.join(models)}; {of_processor}" if gpus else of_processor


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Samples of how fast this node is, one a line: NAME VALUE UNIT.")
    parser.add_argument("--rank", type=int, default=0, help="of this node among those that are measured")
    parser.add_argument("--size", type=int, default=1, help="how many they are")
    parser.add_argument("--meet", default="", help="folder that all of them see, to find each other for all-reduces")
    parser.add_argument("--disk", default="", help="folder of this node to write in; else nothing is written")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each measurement")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a sample, at least")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Checkpoint save rate against the disk's own sequential write rate, and the training's stall;
prints the ratios.

    python benchmarks/checkpoint_rate.py [--gibibytes 1] [--ranks 2] [--repeats 3] [--folder DIR]

The raw rates: `ranks` processes write one file each, together as many bytes as the checkpoint, in 8
MiB pieces, and flush it to disk, once through the page cache (as `dd conv=fsync` does) and once
past it. The save: `ranks` data-parallel ranks save bf16 weights (2 bytes a parameter) and fp32
master weights and moments (12 bytes), with digests, manifest and flush. The asynchronous save is
made beside steps of computation, one thread a rank: its stall is the time in `start`, its slow-down
the time by which the steps beside it, polls included, took longer than as many undisturbed ones.
The load: digests verified by all ranks, then read back. All take turns within each repeat. Last, as
many bytes as a rank's share are copied at once, and by a thread in pieces beside the steps: what
these lose.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainer.checkpoint import store
from trainer.checkpoint.publishing import CheckpointInfo, Extras, Finished, NewCheckpoint
from trainer.checkpoint.writer import AsyncSaver
from trainer.parallel.state import FRAGMENT_KINDS, Fragment, LocalTensor, ShardedState

PIECE = 8 << 20
COLUMNS = 1024


def synthetic_state(rank: int, ranks: int, parameters: int, tensors: int = 24) -> ShardedState:
    """One data-parallel rank's state: `tensors` equal matrices, held by all, and its ZeRO-1 share
    of the masters.
    """
    shape = (max(ranks, parameters // tensors // COLUMNS), COLUMNS)
    weights = [
        LocalTensor(
            f"layer.{number}.weight", shape, (0, 0), torch.randn(shape).to(torch.bfloat16), True
        )
        for number in range(tensors)
    ]
    numel = shape[0] * COLUMNS
    partition = -(-numel * tensors // ranks)
    buffers = {kind: torch.randn(partition) for kind in FRAGMENT_KINDS}
    fragments = []
    for number in range(tensors):
        low = max(rank * partition, number * numel)
        high = min((rank + 1) * partition, (number + 1) * numel)
        if low < high:
            held = slice(low - rank * partition, high - rank * partition)
            views = {kind: buffer[held] for kind, buffer in buffers.items()}
            name, start = f"layer.{number}.weight", low - number * numel
            fragments.append(Fragment(name, shape, shape, (0, 0), start, high - low, views, True))
    return ShardedState(weights, fragments, 1)


def raw_write(path: Path, size: int, flags: int = 0) -> None:
    """Write `size` bytes in large pieces and flush them to disk."""
    piece = mmap.mmap(-1, PIECE)  # begins at a page, as writing past the page cache demands
    piece.write(os.urandom(PIECE))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
    try:
        for _ in range(-(-size // PIECE)):
            os.write(descriptor, piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def multiplied(matrix: torch.Tensor) -> float:
    """Seconds of a step's computation."""
    begin = time.perf_counter()
    for _ in range(5):
        torch.mm(matrix, matrix)
    return time.perf_counter() - begin


def copied_beside(size: int, step: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a copy of `size` bytes at once, and by which steps are slower while a thread
    copies them in pieces.
    """
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    usual = statistics.median(step() for _ in range(30))
    begin = time.perf_counter()
    target.copy_(source)
    at_once = time.perf_counter() - begin

    def copy() -> None:
        for first in range(0, size, 2 * PIECE):
            target[first : first + 2 * PIECE].copy_(source[first : first + 2 * PIECE])

    copier, steps = threading.Thread(target=copy), 0
    begin = time.perf_counter()
    copier.start()
    while copier.is_alive():
        step()
        steps += 1
    return at_once, time.perf_counter() - begin - steps * usual


class Row(NamedTuple):
    """Seconds that one repeat took; `steps` is how many steps the asynchronous save lasted."""

    size: int
    cached: float
    direct: float
    save: float
    stall: float
    lasting: float
    slowdown: float
    steps: int
    verify: float
    load: float
    copy: float
    beside: float


def measure(rank: int, ranks: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    """One rank's part of the measurement; rank 0 sends a Row per repeat."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    state = synthetic_state(rank, ranks, int(options.gibibytes * (1 << 30) / 14))
    info = CheckpointInfo({"data": ranks}, {})
    extras = Extras({"consumed_samples": 0, "consumed_tokens": 0})
    matrix, flag = torch.randn(600, 600), torch.zeros(1)

    def timed(action: Any) -> float:
        os.sync()
        dist.barrier()
        begin = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - begin

    def step() -> float:
        begin = time.perf_counter()
        multiplied(matrix)
        dist.all_reduce(flag)
        return time.perf_counter() - begin

    def beside_steps(saver: AsyncSaver) -> tuple[float, float, float, int]:
        """Stall, seconds until it is a checkpoint, slow-down of the steps in between, and their
        number.
        """
        usual = statistics.median(step() for _ in range(30))
        os.sync()
        dist.barrier()
        begin = time.perf_counter()
        saver.start(1, state, extras, info)
        dist.barrier()
        stall, steps, outcome = time.perf_counter() - begin, 0, None
        while outcome is None:
            step()
            steps += 1
            outcome = saver.poll()
        assert isinstance(outcome, Finished), outcome
        return stall, outcome.seconds, time.perf_counter() - begin - stall - steps * usual, steps

    saver = AsyncSaver(folder / "beside", print)
    saver.start(1, state, extras, info)  # allocates the memory of all later ones
    saver.wait()
    size = store.save(NewCheckpoint(folder / "warm", 1, extras, info), state).bytes
    for repeat in range(options.repeats):
        place, raw_path = folder / str(repeat), folder / f"raw{rank}"
        cached = timed(lambda: raw_write(raw_path, size // ranks))  # noqa: B023
        raw_path.unlink()
        direct = timed(lambda: raw_write(raw_path, size // ranks, os.O_DIRECT))  # noqa: B023
        raw_path.unlink()
        saved = timed(lambda: store.save(NewCheckpoint(place, 1, extras, info), state))  # noqa: B023
        beside = beside_steps(saver)
        verified = timed(lambda: store.find_resumable(place, "digests", True, print))  # noqa: B023
        loaded = timed(lambda: store.load(place, 1, state, info))  # noqa: B023
        copied = copied_beside(size // ranks, partial(multiplied, matrix))
        if rank == 0:
            results.send(Row(size, cached, direct, saved, *beside, verified, loaded, *copied))
            shutil.rmtree(place)
    saver.close()
    dist.destroy_process_group()


def shown(row: Row) -> str:
    """One repeat in words."""
    rates = {
        name: row.size / 1e6 / getattr(row, name)
        for name in ("cached", "direct", "save", "verify", "load")
    }
    stall, save, lasting, slowdown = (
        round(1000 * each) for each in (row.stall, row.save, row.lasting, row.slowdown)
    )
    return (
        f"{row.size / 1e6:.0f} MB: raw {rates['cached']:.0f} and {rates['direct']:.0f}, save {rates['save']:.0f}, "
        f"verify {rates['verify']:.0f}, load {rates['load']:.0f} MB/s; asynchronous: stall {stall} ms of {save}, "
        f"a checkpoint after {lasting}, {row.steps:.0f} steps slower by {slowdown}; a rank's share copied at once in "
        f"{1000 * row.copy:.0f} ms, beside steps, which were slower by {1000 * row.beside:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gibibytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default: the temporary folder"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tr11-checkpoint-rate-", dir=options.folder) as name:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        shared = (options.ranks, Path(name), options, sender)
        workers = [
            context.Process(target=measure, args=(rank, *shared)) for rank in range(options.ranks)
        ]
        for worker in workers:
            worker.start()
        rows: list[Row] = []
        while len(rows) < options.repeats and all(
            worker.exitcode in {None, 0} for worker in workers
        ):
            if receiver.poll(1.0):
                rows.append(receiver.recv())
                print(f"  {shown(rows[-1])}", flush=True)
        for worker in workers:
            worker.join()
    middle = Row(*(statistics.median(column) for column in zip(*rows, strict=True)))
    print(f"median of {len(rows)}: {shown(middle)}")
    for name in ("cached", "direct"):
        ratio = statistics.median(getattr(row, name) / row.save for row in rows)
        how = "through" if name == "cached" else "past"
        print(
            f"save rate by the raw rate {how} the page cache, each repeat by itself: {ratio:.2f} (budget >= 0.80)"
        )
    stalls = statistics.median(row.stall / row.save for row in rows)
    print(
        f"stall of an asynchronous save by the time of a synchronous one: {stalls:.2f} (budget <= 0.10)"
    )


if __name__ == "__main__":
    main()

"""Checkpoint save rate against the disk's own sequential write rate, measured in turn in one run; prints the ratio.

    python benchmarks/checkpoint_rate.py [--gibibytes 1] [--ranks 2] [--repeats 3] [--folder DIR]

The raw rate: `ranks` processes write one file each, together as many bytes as the checkpoint, in 8 MiB pieces, and
flush it to disk. The save: `ranks` data-parallel ranks save bf16 weights (2 bytes a parameter) and fp32 master weights
and moments (12 bytes), with digests, manifest and flush. The load: digests verified by all ranks, then read back.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint import store
from trainer.checkpoint.state import FRAGMENT_KINDS, Fragment, LocalTensor, ShardedState
from trainer.checkpoint.store import CheckpointInfo, Extras

PIECE = 8 << 20
COLUMNS = 1024


def synthetic_state(rank: int, ranks: int, parameters: int, tensors: int = 24) -> ShardedState:
    """One data-parallel rank's state: `tensors` equal matrices, held by all, and its ZeRO-1 share of the masters."""
    shape = (max(ranks, parameters // tensors // COLUMNS), COLUMNS)
    weights = [
        LocalTensor(f"layer.{number}.weight", shape, (0, 0), torch.randn(shape).to(torch.bfloat16), True)
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


def raw_write(path: Path, size: int) -> None:
    """Write `size` bytes in large pieces and flush them to disk."""
    piece = os.urandom(PIECE)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for _ in range(size // PIECE):
            os.write(descriptor, piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measure(rank: int, ranks: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    """One rank's part of the measurement; rank 0 sends (raw, save, verify, load) in bytes per second per repeat."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    state = synthetic_state(rank, ranks, int(options.gibibytes * (1 << 30) / 14))
    info = CheckpointInfo({"data": ranks}, {})
    extras = Extras({"consumed_samples": 0, "consumed_tokens": 0})

    def timed(action: Any) -> float:
        os.sync()
        dist.barrier()
        begin = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - begin

    size = store.save(folder / "warm", 1, state, extras, info).bytes
    for repeat in range(options.repeats):
        place = folder / str(repeat)
        raw_path = folder / f"raw{repeat}-{rank}"
        raw = timed(lambda: raw_write(raw_path, size // ranks))  # noqa: B023
        raw_path.unlink()
        saved = timed(lambda: store.save(place, 1, state, extras, info))  # noqa: B023
        verified = timed(lambda: store.find_resumable(place, "digests", True, print))  # noqa: B023
        loaded = timed(lambda: store.load(place, 1, state, info))  # noqa: B023
        if rank == 0:
            results.send((size, tuple(size / seconds for seconds in (raw, saved, verified, loaded))))
            shutil.rmtree(place)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gibibytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: the temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tr11-checkpoint-rate-", dir=options.folder) as name:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        shared = (options.ranks, Path(name), options, sender)
        workers = [context.Process(target=measure, args=(rank, *shared)) for rank in range(options.ranks)]
        for worker in workers:
            worker.start()
        rows = []
        while len(rows) < options.repeats and all(worker.exitcode in {None, 0} for worker in workers):
            if receiver.poll(1.0):
                size, rates = receiver.recv()
                rows.append(rates)
                shown = ", ".join(f"{rate / 1e6:.0f}" for rate in rates)
                print(f"  {size / 1e6:.0f} MB, raw, save, verify, load: {shown} MB/s", flush=True)
        for worker in workers:
            worker.join()
    raw, saved, verified, loaded = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"raw write {raw / 1e6:.0f} MB/s, save {saved / 1e6:.0f} MB/s: ratio {saved / raw:.2f} (budget >= 0.80)")
    print(f"verify {verified / 1e6:.0f} MB/s, load {loaded / 1e6:.0f} MB/s (from the page cache)")


if __name__ == "__main__":
    main()

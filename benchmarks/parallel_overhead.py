"""What parallelism costs: ranks that train one model together, against as many processes that train
alone.

    python benchmarks/parallel_overhead.py [--shapes tp2 pp2 dp2 tp4 pp4 dp4] [--steps 4]

The work of a rank is the same throughout: R ranks together take R times the tokens of one process
alone. The two sides are as many processes, one thread each, that take turns step by step, so both
have the same cores and meet the same load, and the ratio of their times is what collectives, the
pipeline's bubble and the cutting of matrices cost. With more ranks than cores the ranks wait for
each other's turns on a core: the ratio of processor time leaves that out (a rank that waits for
another uses none), that of wall time does not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from models import Shape, card, engine_step
from msgspec.structs import replace

from tr11ops.agent.allocation import free_port
from trainer.pipeline.library import init_distributed

ALONE = Shape(layers=4, hidden=256, heads=8, vocabulary=4096, length=256, micro=2, accumulated=4)
AXES = {"tp": "tensor", "pp": "pipeline", "dp": "data"}
PATIENCE = 600.0


def work(rank: int, ranks: int, port: int, axis: str, orders: Connection) -> None:
    """One process: build the engine, then make a step at each order and answer with (seconds,
    processor seconds).
    """
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    device = torch.device("cpu")
    init_distributed(device)
    shape = together(axis, ranks)
    step = engine_step(card(shape, **({} if ranks == 1 else {AXES[axis]: ranks})), device)
    generator = torch.Generator().manual_seed(rank if axis == "dp" else 0)
    while orders.recv():
        windows = shape.windows(generator)
        began, used = time.perf_counter(), time.process_time()
        step(windows)
        orders.send((time.perf_counter() - began, time.process_time() - used))
    torch.distributed.destroy_process_group()


def together(axis: str, ranks: int) -> Shape:
    """What one replica's step holds when `ranks` share the work along `axis`."""
    if axis == "tp":
        return replace(ALONE, micro=ALONE.micro * ranks)
    if axis == "pp":
        return replace(ALONE, accumulated=ALONE.accumulated * ranks)
    return ALONE


@contextmanager
def team(groups: int, ranks: int, axis: str) -> Iterator[list[Connection]]:
    """`groups` process groups of `ranks` each; the ends to order their steps by."""
    context = multiprocessing.get_context("spawn")
    ends, workers = [], []
    for _ in range(groups):
        port = free_port()
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=work, args=(rank, ranks, port, axis, theirs), daemon=True
            )
            worker.start()
            theirs.close()
            ends.append(ours)
            workers.append(worker)
    try:
        yield ends
        for end in ends:
            end.send(False)
        for worker in workers:
            worker.join(60)
    finally:
        for worker in workers:
            worker.kill()


def step_of(ends: list[Connection]) -> tuple[float, float]:
    """One step of everyone at once: seconds of the slowest, processor seconds of all."""
    for end in ends:
        end.send(True)
    answers: list[Any] = []
    for end in ends:
        if not end.poll(PATIENCE):
            raise SystemExit(f"a rank made no step in {PATIENCE:.0f} s")
        answers.append(end.recv())
    return max(seconds for seconds, _ in answers), sum(used for _, used in answers)


def measure(axis: str, ranks: int, steps: int) -> None:
    """Print one line."""
    with team(ranks, 1, axis) as alone, team(1, ranks, axis) as joint:
        step_of(alone), step_of(joint)  # these warm up
        pairs = [(step_of(alone), step_of(joint)) for _ in range(steps)]
    wall = statistics.median(joint[0] / alone[0] for alone, joint in pairs)
    processor = statistics.median(joint[1] / alone[1] for alone, joint in pairs)
    tokens = ranks * ALONE.tokens
    rates = [tokens / statistics.median(pair[side][0] for pair in pairs) for side in (1, 0)]
    bubble = (
        f", of it the bubble {(ranks - 1) / (ALONE.accumulated * ranks):.2f}"
        if axis == "pp"
        else ""
    )
    print(
        f"  {AXES[axis]:9} {ranks}: tokens/s together {rates[0]:7.0f}, alone {rates[1]:7.0f}; "
        f"wall time {wall:5.2f}x, processor time {processor:5.2f}x{bubble}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["tp2", "pp2", "dp2", "tp4", "pp4", "dp4"])
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(
        f"gloo, fp32, one thread a rank, {cores} cores, {ALONE.tokens} tokens of each rank in a step"
    )
    for name in options.shapes:
        axis, ranks = name[:2], int(name[2:])
        if axis not in AXES:
            raise SystemExit(f"{name}: one of tp, pp, dp and a number of ranks, e.g. tp2")
        measure(axis, ranks, options.steps)


if __name__ == "__main__":
    main()

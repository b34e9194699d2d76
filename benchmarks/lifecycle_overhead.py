"""What the lifecycle costs each iteration: the looks themselves, and the one small collective that
all ranks act on.

python benchmarks/lifecycle_overhead.py [--ranks 8] [--iterations 2000]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.config.card import LoggingSection, RunSection, TrainerConfig
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.lease import Lease
from trainer.control.control_signals import ControlSignals
from trainer.control.lifecycle import HeartbeatWriter, SignalFlag, StopConditions, Worker


def checks_microseconds(iterations: int) -> float:
    """Median cost of one iteration's looks on rank 0: switches and requests as files, the clock,
    the heartbeat.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run = {
            "name": "run",
            "directory": folder,
            "exit_duration_minutes": 5990.0,
            "exit_interval": 10**9,
        }
        config = TrainerConfig.model_construct(
            run=RunSection.model_validate(run), logging=LoggingSection()
        )
        heartbeat = HeartbeatWriter(config.paths, 0, "1")
        attempt = AttemptIdentity("1", 1, root / "stop-request.json")
        lease = Lease.begin(config.paths, "1", 1)
        assert lease.take() is None
        worker = Worker(config, attempt, 0, heartbeat, SignalFlag(), lease=lease)
        control_signals = ControlSignals(
            worker, StopConditions.of(config, time.time()), lambda own: own
        )
        costs = []
        for iteration in range(iterations):
            began = time.perf_counter()
            control_signals.agree(iteration, True)
            heartbeat.beat("training", iteration)
            costs.append(time.perf_counter() - began)
        lease.release()
    return statistics.median(costs) * 1e6


def _collectives(
    rank: int, ranks: int, port: int, iterations: int, results: multiprocessing.Queue[float]
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    costs = []
    for _ in range(iterations):
        small = torch.zeros(9, dtype=torch.int32)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(small, dist.ReduceOp.MAX)
        costs.append(time.perf_counter() - began)
    if rank == ranks - 1:
        results.put(statistics.median(costs) * 1e6)
    dist.destroy_process_group()


def collective_microseconds(ranks: int, iterations: int) -> float:
    """Median cost of the all-reduce of 36 bytes over gloo, seen by the last rank."""
    from tr11ops.agent.allocation import free_port

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = free_port()
    workers = [
        context.Process(target=_collectives, args=(rank, ranks, port, iterations, results))
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    measured = results.get(timeout=300)
    for worker in workers:
        worker.join(60)
    return float(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=2000)
    options = parser.parse_args()
    checks = checks_microseconds(options.iterations)
    print(f"checks and heartbeat on rank 0:   {checks:8.1f} us an iteration (budget: 100)")
    cost = collective_microseconds(options.ranks, min(options.iterations, 300))
    print(f"the collective, {options.ranks} ranks on gloo: {cost:8.1f} us an iteration")


if __name__ == "__main__":
    main()

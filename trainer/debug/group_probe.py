"""Do these nodes compute, remember and talk? One short run on all of them; exit status 1, and why,
where they do not.

    srun --ntasks-per-node=1 python -m trainer.debug.group_probe

Under Slurm rank and size are those of the step, and rank 0 is on the node that started it; under
torchrun they are those of its environment. Every number is checked against the one that must come
out, so that a GPU which counts wrongly fails as surely as one which hangs.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import distributed

from trainer.contract.errors import ProbeFailure
from trainer.contract.units import shortened

SIDE = 512  # of the matrices; whole numbers below 2**24, so float32 sums are exact
WORDS = 1 << 20
ROUNDS = 20
PATIENCE = timedelta(seconds=60)
PORT = 29_731


def main(environment: Mapping[str, str]) -> int:
    rank = int(environment.get("RANK", environment.get("SLURM_PROCID", "0")))
    size = int(environment.get("WORLD_SIZE", environment.get("SLURM_NTASKS", "1")))
    place = f"rank {rank} on {environment.get('SLURMD_NODENAME', socket.gethostname())}"
    try:
        device = _device(environment)
        compute(device)
        remember(device)
        if size > 1:
            _talk(rank, size, device, environment)
    except (ProbeFailure, RuntimeError, OSError) as error:
        print(f"{place}: {shortened(' '.join(str(error).split()), 300)}", flush=True)
        return 1
    print(f"{place}: fine", flush=True)
    return 0


def _device(environment: Mapping[str, str]) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def compute(device: torch.device) -> None:
    """Matrix products whose result is known: rows of ones and twos. Raises ProbeFailure."""
    left = torch.ones(SIDE, SIDE, device=device)
    right = torch.full((SIDE, SIDE), 2.0, device=device)
    for _ in range(ROUNDS):
        if not torch.equal(left @ right, torch.full((SIDE, SIDE), 2.0 * SIDE, device=device)):
            raise ProbeFailure("a matrix product came out wrong")


def remember(device: torch.device) -> None:
    """A pattern written, copied and read back. Raises ProbeFailure."""
    pattern = torch.arange(WORDS, dtype=torch.int32, device=device)
    for turn in range(ROUNDS):
        copy = (pattern ^ turn).clone()
        if not torch.equal(copy ^ turn, pattern):
            raise ProbeFailure("memory gave back something else than was written")


def _talk(rank: int, size: int, device: torch.device, environment: Mapping[str, str]) -> None:
    address = environment.get("MASTER_ADDR") or environment.get(
        "SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"
    )
    port = int(
        environment.get("MASTER_PORT", PORT + int(environment.get("SLURM_JOB_ID", "0")) % 1000)
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=size, timeout=PATIENCE
    )
    try:
        begun = time.monotonic()
        for turn in range(ROUNDS):
            value = torch.full((WORDS // 16,), float(rank + turn), device=device)
            distributed.all_reduce(value)
            expected = size * (size - 1) / 2 + size * turn
            if not torch.equal(value, torch.full_like(value, expected)):
                raise ProbeFailure(f"an all-reduce over {size} ranks came out wrong")
        if rank == 0:
            print(
                f"{ROUNDS} all-reduces over {size} ranks in {time.monotonic() - begun:.2f} s",
                flush=True,
            )
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(os.environ))

"""Random numbers for dropout, so that tensor ranks agree where they must and differ where they
must.

The default generators carry one stream per step, seeded as a function of the seed, the step and the
worker's pipeline and data coordinates: alike on all tensor ranks. Outside tensor regions these hold
the same activations, or, with sequence parallelism, each a stretch of them, of whose whole it draws
the mask. A *tensor region* (attention heads of this worker) borrows the generators with a seed
drawn from that stream and the tensor rank. The draw comes from the CPU generator, which activation
checkpointing restores before recomputing, so a recomputed mask equals the first one. Flex attention
needs no such region: its masks follow from the number of a head in the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.parallel.mesh import Mesh


def seed_step(seed: int, step: int, mesh: Mesh) -> None:
    """Start the stream of one training step; a resumed run thus needs no saved generator state."""
    key = f"{seed}/dropout/{step}/{mesh.pipeline_rank}/{mesh.data_rank}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


@contextmanager
def tensor_region(mesh: Mesh) -> Iterator[None]:
    """Within this block random numbers differ between tensor ranks; outside, the stream of the step
    goes on.
    """
    if mesh.tensor == 1:
        yield
        return
    drawn = int(torch.randint(1 << 62, ()).item())
    if mesh.device.type == "cuda":
        devices = [mesh.device]
    else:
        devices = []
    with torch.random.fork_rng(devices):
        torch.manual_seed((drawn + mesh.tensor_rank * 0x9E3779B97F4A7C15) % (1 << 62))
        yield

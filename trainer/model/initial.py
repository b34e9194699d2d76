"""Initial weights that do not depend on how the model is cut.

Each logical tensor is a function of (seed, its logical name) alone: it is drawn in fp32 on the CPU, block of rows by
block of rows, every block from a generator of its own. A worker draws only the blocks that its slice touches, so no
worker ever holds a whole large tensor, and any tensor x pipeline x data layout starts from the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.parallel.shard import Sharding, sharding_of

BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Initial:
    """Distribution of a parameter at the start: normal around `mean` with deviation `std`; constant when `std` is 0."""

    mean: float
    std: float = 0.0


ZEROS = Initial(0.0)
ONES = Initial(1.0)


def output_projection_std(std: float, layers: int) -> float:
    """Deviation of the projections that write into the residual stream: sigma / sqrt(2 L)."""
    return std / math.sqrt(2.0 * layers)


@torch.no_grad()
def initialise(name: str, parameter: nn.Parameter, seed: int, tensor_rank: int) -> None:
    """Fill this worker's slice of the logical parameter `name`.

    Raises ValueError when the layer did not say how the parameter begins.
    """
    initial = getattr(parameter, "initial", None)
    if not isinstance(initial, Initial):
        raise ValueError(f"{name} has no declared initial distribution")
    if initial.std == 0.0:
        parameter.fill_(initial.mean)
        return
    for rows, block in _blocks(name, seed, tuple(parameter.shape), sharding_of(parameter), tensor_rank):
        parameter[rows].copy_(block.mul_(initial.std).add_(initial.mean))


def _blocks(
    name: str, seed: int, local: tuple[int, ...], sharding: Sharding, tensor_rank: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows of the local slice, standard normal values for them)."""
    whole = sharding.global_shape(local)
    columns = math.prod(whole[1:])
    height = max(1, BLOCK_ELEMENTS // columns)
    offsets = sharding.offsets(local, tensor_rank)
    first, last = offsets[0], offsets[0] + local[0]
    inner = tuple(slice(start, start + size) for start, size in zip(offsets[1:], local[1:], strict=True))
    for index in range(first // height, -(-last // height)):
        begin = index * height
        block = _normal(f"{seed}/{name}/{index}", (min(height, whole[0] - begin), *whole[1:]))
        low, high = max(first, begin), min(last, begin + height)
        yield slice(low - first, high - first), block[(slice(low - begin, high - begin), *inner)]


def _normal(key: str, shape: tuple[int, ...]) -> Tensor:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32)

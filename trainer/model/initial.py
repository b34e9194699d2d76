"""Initial weights that do not depend on how the model is cut.

Each logical tensor is a function of (seed, its logical name) alone: it is drawn in fp32 on the CPU,
block of rows by block of rows, every block from a generator of its own. A worker draws only the
blocks that its slice touches, so no worker ever holds a whole large tensor, and any tensor x
pipeline x data layout starts from the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from trainer.contract.record import Record
from trainer.parallel.shard import Sharding, sharding_of

BLOCK_ELEMENTS = 1 << 18
Draw = Callable[..., Tensor]  # (shape, generator=, dtype=) -> values


class Initial(Record):
    """Distribution of a parameter at the start: normal around `mean` with deviation `std`; constant
    when `std` is 0.

    A card may ask for Xavier's distribution instead of the normal one: see `initialise`.
    """

    mean: float
    std: float = 0.0


ZEROS = Initial(0.0)
ONES = Initial(1.0)


def output_projection_std(std: float, layers: int) -> float:
    """Deviation of the projections that write into the residual stream: sigma / sqrt(2 L)."""
    return std / math.sqrt(2.0 * layers)


def xavier_bound(rows: int, columns: int) -> float:
    """Of Glorot and Bengio's uniform initialisation of a matrix [rows, columns]: sqrt(6 / (rows +
    columns)).
    """
    return math.sqrt(6.0 / (rows + columns))


@torch.no_grad()
def initialise(
    name: str, parameter: nn.Parameter, seed: int, tensor_rank: int, is_xavier: bool = False
) -> None:
    """Fill this worker's slice of the logical parameter `name`.

    `is_xavier`: a matrix that is drawn at random is so evenly within the bound of the whole matrix,
    however it is cut. Raises ValueError when the layer did not say how the parameter begins.
    """
    initial = getattr(parameter, "initial", None)
    if not isinstance(initial, Initial):
        raise ValueError(f"{name} has no declared initial distribution")
    if initial.std == 0.0:
        parameter.fill_(initial.mean)
        return
    if parameter.dim() == 3:  # several matrices in one weight, each drawn as one alone is
        inner = replace(sharding_of(parameter), dim=0)  # cut along their rows
        for index, matrix in enumerate(parameter):
            _fill(
                f"{name}/{index}",
                matrix,
                sharding=inner,
                seed=seed,
                tensor_rank=tensor_rank,
                initial=initial,
                is_xavier=is_xavier,
            )
    else:
        _fill(
            name,
            parameter,
            sharding=sharding_of(parameter),
            seed=seed,
            tensor_rank=tensor_rank,
            initial=initial,
            is_xavier=is_xavier,
        )


def _fill(
    name: str,
    tensor: Tensor,
    sharding: Sharding,
    seed: int,
    tensor_rank: int,
    initial: Initial,
    is_xavier: bool,
) -> None:
    """Fill the slice `tensor` of a whole one that is known as `name`."""
    local = tuple(tensor.shape)
    draw: Draw = torch.randn
    scale = initial.std
    if is_xavier and tensor.dim() == 2:
        rows, columns = sharding.global_shape(local)
        draw, scale = _even, xavier_bound(rows, columns)
    for place, block in _blocks(
        name, seed, local=local, sharding=sharding, tensor_rank=tensor_rank, draw=draw
    ):
        tensor[place].copy_(block.mul_(scale).add_(initial.mean))


def _blocks(
    name: str, seed: int, local: tuple[int, ...], sharding: Sharding, tensor_rank: int, draw: Draw
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows of the local slice, values for them as `draw` gives them)."""
    whole = sharding.global_shape(local)
    columns = math.prod(whole[1:])
    height = max(1, BLOCK_ELEMENTS // columns)
    offsets = sharding.offsets(local, tensor_rank)
    first, last = offsets[0], offsets[0] + local[0]
    inner = tuple(
        slice(start, start + size) for start, size in zip(offsets[1:], local[1:], strict=True)
    )
    for index in range(first // height, -(-last // height)):
        begin = index * height
        shape = (min(height, whole[0] - begin), *whole[1:])
        block = draw(shape, generator=_generator(f"{seed}/{name}/{index}"), dtype=torch.float32)
        low, high = max(first, begin), min(last, begin + height)
        yield slice(low - first, high - first), block[(slice(low - begin, high - begin), *inner)]


def _even(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Values that lie evenly in [-1, 1)."""
    return torch.rand(shape, generator=generator, dtype=dtype).mul_(2.0).sub_(1.0)


def _generator(key: str) -> torch.Generator:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

"""How a parameter is cut over tensor-parallel workers: declared once, on the parameter itself.

Everything that must know (gradient norms, initial weights, checkpoints, export, guards) reads the
declaration.
"""

from __future__ import annotations

from torch import nn

from trainer.contract.record import Record


class Sharding(Record):
    """The whole tensor is cut along `dim` into `parts` equal slices, the n-th held by tensor rank
    n.

    `dim` None means replicated: every tensor rank holds the whole tensor.
    """

    dim: int | None
    parts: int

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one slice of a tensor of `shape`. Raises ValueError when it cannot be cut
        evenly.
        """
        if self.dim is None:
            return shape
        if shape[self.dim] % self.parts:
            raise ValueError(
                f"dimension {self.dim} of shape {shape} cannot be cut into {self.parts} equal parts"
            )
        return _replace(shape, self.dim, shape[self.dim] // self.parts)

    def global_shape(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor whose slices have shape `local`."""
        if self.dim is None:
            return local
        return _replace(local, self.dim, local[self.dim] * self.parts)

    def offsets(self, local: tuple[int, ...], index: int) -> tuple[int, ...]:
        """Where slice number `index` of shape `local` begins in the whole tensor, one number per
        dimension.
        """
        return tuple(index * size if dim == self.dim else 0 for dim, size in enumerate(local))


def _replace(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def declare(parameter: nn.Parameter, sharding: Sharding) -> nn.Parameter:
    """Attach `sharding` to a parameter and return it.

    Also sets the mark by which DeepSpeed tells sharded from replicated parameters: without it the
    latter's rule (count on tensor rank 0 only) would be applied to every slice, and the gradient
    norm would be wrong.
    """
    parameter.sharding = sharding  # type: ignore[attr-defined]
    parameter.model_parallel = sharding.dim is not None  # type: ignore[attr-defined]
    return parameter


def sharding_of(parameter: nn.Parameter) -> Sharding:
    """The declared sharding. Raises ValueError when a layer forgot to declare it."""
    sharding = getattr(parameter, "sharding", None)
    if not isinstance(sharding, Sharding):
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has no declared sharding")
    return sharding

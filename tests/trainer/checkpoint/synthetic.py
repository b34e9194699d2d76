"""A small model's state with known values, dealt to ranks as tensor, pipeline and ZeRO-1 data
parallelism deal it.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from trainer.contract.record import Record
from trainer.parallel.state import FRAGMENT_KINDS, Fragment, LocalTensor, ShardedState

ALIGNMENT = 8  # elements: ZeRO pads the flat buffer so that every partition has the same size


class Shape(Record):
    """Degrees of parallelism; ranks count pipeline slowest, tensor fastest."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def topology(self) -> dict[str, int]:
        return {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}


class Model(Record):
    """Logical parameters: name -> (shape, dimension cut by tensor parallelism or None)."""

    layers: int = 4
    hidden: int = 12
    vocabulary: int = 20

    def stages(self, count: int) -> list[dict[str, tuple[tuple[int, ...], int | None]]]:
        """The parameters of each stage; the tied embedding is on the first and on the last."""
        hidden, embedding = self.hidden, {"embedding.weight": ((self.vocabulary, self.hidden), 0)}
        dealt: list[dict[str, tuple[tuple[int, ...], int | None]]] = [{} for _ in range(count)]
        dealt[0] |= embedding
        for layer in range(self.layers):
            dealt[layer * count // self.layers] |= {
                f"layer.{layer}.norm.weight": ((hidden,), None),
                f"layer.{layer}.qkv.weight": ((4, 3, hidden // 4, hidden), 0),
                f"layer.{layer}.output.weight": ((hidden, 4 * hidden), 1),
                f"layer.{layer}.output.bias": ((hidden,), None),
            }
        dealt[-1] |= {"final_norm.weight": ((hidden,), None)} | embedding
        return dealt


def logical(name: str, kind: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The known value of a logical tensor at a step: fp32, different for every name, kind and step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{kind}/{step}".encode()))
    return torch.randn(shape, generator=generator)


def state(
    model: Model, shape: Shape, rank: int, step: int | None, dtype: torch.dtype = torch.bfloat16
) -> ShardedState:
    """One rank's state at `step`; None gives NaN everywhere, to be filled by a load."""
    tensor_rank, data_rank = rank % shape.tensor, rank // shape.tensor % shape.data
    stage = rank // (shape.tensor * shape.data)
    weights, slices = [], []
    for name, (full, cut) in model.stages(shape.pipeline)[stage].items():
        local, offsets = list(full), [0] * len(full)
        if cut is not None:
            local[cut] = full[cut] // shape.tensor
            offsets[cut] = tensor_rank * local[cut]
        tied_copy = name == "embedding.weight" and stage > 0
        region = tuple(
            slice(start, start + size) for start, size in zip(offsets, local, strict=True)
        )
        slices.append((name, full, tuple(local), tuple(offsets), region, not tied_copy))
        value = (
            logical(name, "weight", full, step)[region]
            if step is not None
            else torch.full(local, math.nan)
        )
        weights.append(LocalTensor(name, full, tuple(offsets), value.to(dtype), not tied_copy))
    numel = sum(math.prod(local) for _, _, local, *_ in slices)
    unit = ALIGNMENT * shape.data
    partition = -(-numel // unit) * unit // shape.data
    begin, end = data_rank * partition, (data_rank + 1) * partition
    buffers = {kind: torch.full((partition,), math.nan) for kind in FRAGMENT_KINDS}
    fragments, position = [], 0
    for name, full, local, offsets, region, owner in slices:
        size = math.prod(local)
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            start, held = low - position, slice(low - begin, high - begin)
            views = {kind: buffer[held] for kind, buffer in buffers.items()}
            for kind, view in views.items():
                if step is not None:
                    view.copy_(
                        logical(name, kind, full, step)[region].flatten()[
                            start : start + high - low
                        ]
                    )
            fragments.append(Fragment(name, full, local, offsets, start, high - low, views, owner))
        position += size
    return ShardedState(weights, fragments, 0 if step is None else 1000 + step)


def differences(found: ShardedState, wanted: ShardedState) -> list[str]:
    """Names of tensors that are not bitwise equal."""
    different = [
        mine.name
        for mine, theirs in zip(found.weights, wanted.weights, strict=True)
        if not torch.equal(mine.tensor, theirs.tensor)
    ]
    for mine, theirs in zip(found.fragments, wanted.fragments, strict=True):
        kinds = [
            kind
            for kind in FRAGMENT_KINDS
            if not torch.equal(mine.tensors[kind], theirs.tensors[kind])
        ]
        different += [f"{mine.name}/{kind}" for kind in kinds]
    return different

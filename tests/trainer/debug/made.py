"""States made of plain tensors, held by the ranks of a grid: what dumps would show, without a
training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.fingerprint import fingerprint
from trainer.debug.compare import Difference, differences
from trainer.debug.diff_command import judge, pair_up
from trainer.debug.record import Moment, RankCoordinates
from trainer.debug.report import DiffFinding, DiffVerdict
from trainer.debug.snapshot import Kind, Reader, StateSnapshot, TensorCopy

SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "embedding.word.weight": ((8, 4), 0),
    "blocks.0.input_norm.weight": ((4,), None),
    "blocks.0.mlp.down.weight": ((4, 6), 1),
    "blocks.1.mlp.up.weight": ((6, 4), 0),
    "final_norm.bias": ((4,), None),
}
STAGES = {"embedding.word.weight": (0, 1), "blocks.1.mlp.up.weight": (1,), "final_norm.bias": (1,)}


def whole(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, _) in SHAPES.items()
    }


def reader(tensor: Tensor) -> Reader:
    def read(offsets: Any, sizes: Any) -> Tensor:
        return tensor[
            tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
        ]

    return read


def dumped(
    tensors: Mapping[str, Tensor],
    grid: tuple[int, int, int] = (2, 2, 2),
    spoil: Mapping[tuple[str, int], Any] | None = None,
    *,
    full: bool = True,
    label: str = "A",
    moment: Moment = "after-iteration",
    completed: int = 5,
    facts: Mapping[str, Any] | None = None,
    missing: tuple[int, ...] = (),
) -> StateSnapshot:
    """What all ranks of a grid (pipeline, data, tensor) hold. `spoil`: (name, rank) -> a function
    of the local tensor.
    """
    pipeline, data, tensor = grid
    copies = []
    ranks = [(s, d, t) for s in range(pipeline) for d in range(data) for t in range(tensor)]
    for rank, (stage, replica, part) in enumerate(ranks):
        for name, value in tensors.items():
            if pipeline > 1 and stage not in STAGES.get(name, (0,)):
                continue
            dim = SHAPES[name][1]
            size = 0 if dim is None else value.shape[dim] // tensor
            local = value.clone() if dim is None else value.narrow(dim, part * size, size).clone()
            change = (spoil or {}).get((name, rank))
            local = local if change is None else change(local)
            offsets = tuple(part * size if inner == dim else 0 for inner in range(value.dim()))
            copies.append(
                TensorCopy(
                    kind="weight",
                    name=name,
                    global_shape=tuple(value.shape),
                    offsets=offsets,
                    shape=tuple(local.shape),
                    dtype=str(local.dtype).removeprefix("torch."),
                    replicated=dim is None and tensor > 1,
                    place=RankCoordinates(rank, stage, replica, part),
                    numbers=fingerprint(local, value.shape, offsets),
                    read=reader(local) if full else None,
                )
            )
    return StateSnapshot(
        label=label,
        completed=completed,
        moment=moment,
        topology={"pipeline": pipeline, "data": data, "tensor": tensor},
        facts={rank: dict(facts or {}) for rank in range(len(ranks)) if rank not in missing},
        random_state={rank: {"torch": "0"} for rank in range(len(ranks))},
        copies=tuple(
            copy for copy in copies if copy.place is not None and copy.place.rank not in missing
        ),
        model={},
        is_checkpoint=False,
        missing=missing,
    )


def saved(
    tensors: Mapping[str, Tensor],
    kinds: Mapping[Kind, Mapping[str, Tensor]] | None = None,
    *,
    label: str = "A",
    completed: int = 5,
    facts: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> StateSnapshot:
    """A checkpoint of the same tensors; `kinds`: the optimizer's."""
    every: dict[Kind, Mapping[str, Tensor]] = {"weight": tensors, **(kinds or {})}
    return StateSnapshot(
        label=label,
        completed=completed,
        moment="on-save",
        topology={"pipeline": 1, "data": 1, "tensor": 1},
        facts={-1: dict(facts or {})},
        random_state={},
        copies=tuple(
            TensorCopy(
                kind, name, tuple(value.shape), (0,) * value.dim(), tuple(value.shape),
                str(value.dtype).removeprefix("torch."), read=reader(value),
            )
            for kind, held in every.items()
            for name, value in held.items()
        ),
        model=dict(model or {}),
        is_checkpoint=True,
    )  # fmt: skip


def nobody(count: int) -> None:
    """No one watches the progress."""


def found(a: StateSnapshot, b: StateSnapshot, tolerance: float = 0.0) -> list[Difference]:
    return differences(a, b, tolerance, nobody)


def verdict(a: list[StateSnapshot], b: list[StateSnapshot], tolerance: float = 0.0) -> DiffVerdict:
    return judge(pair_up(a, b), [*a, *b], tolerance, nobody)


def kinds(findings: Iterable[DiffFinding]) -> list[str]:
    return [finding.kind for finding in findings]

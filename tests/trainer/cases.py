"""Tiny trainings for the multi-rank tests: cards, data and loss curves. Everything is a function of
its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.config.card import TrainerConfig
from trainer.contract.record import Record
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh
from trainer.parallel.state import ShardedState
from trainer.pipeline.library import get_accelerator

CPU = torch.device("cpu")
VOCABULARY = 64
RAMP = (4, 8, 8, 12, 12)  # global batches; what ranks say to each other costs most of a test's time
LEARNS = (*RAMP, *(16,) * 16)  # long enough for a loss that falls
FP32_LOSS, FP32_NORM, FP32_WEIGHT = 2e-6, 1e-5, 1e-5  # test_parity.py says why
BF16_LOSS = 2.0**-9 * 4.2 / 8
TOPOLOGIES = [
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (2, 2, 1),
    (2, 1, 2),
    (1, 2, 2),
    (2, 2, 2),
]


def tiny(
    pipeline: int = 1, tensor: int = 1, dtype: str = "fp32", clip: float = 0.3, **model: Any
) -> TrainerConfig:
    """A card of a GPT that trains in milliseconds: 2 layers, 32 wide, 4 heads, 16 tokens, 64 words;
    no dropout.
    """
    shape = {
        "layers": 2, "hidden_size": 32, "attention_heads": 4, "sequence_length": 16, "init_std": 0.05,
        "embedding_layernorm": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    }  # fmt: skip
    card = {
        "run": {"name": "tiny", "directory": "/nowhere"},
        "parallel": {"pipeline": pipeline, "tensor": tensor, "sequence_parallel": False},
        "model": shape | model,
        "batch": {"micro_batch_size": 2, "global_batch_size": 16, "train_samples": 1000},
        "optimizer": {"clip_grad": clip, "weight_decay": 0.1},
        "schedule": {"learning_rate": 3e-3},
        "precision": {"dtype": dtype},
        "checkpoint": {"interval": 10},
        "data": {"prefixes": ["unused"]},
        "tokenizer": {"padded_vocabulary_size": VOCABULARY},
    }
    return TrainerConfig.model_validate(card)


def samples(config: TrainerConfig, step: int, count: int) -> Tensor:
    """[count, length + 1] token ids that can be learnt: the next token is mostly a function of the
    last.
    """
    generator = torch.Generator().manual_seed(step)
    length = config.model.sequence_length + 1
    tokens = torch.randint(VOCABULARY, (count, length), generator=generator)
    for place in range(1, length):
        follow = torch.rand(count, generator=generator) < 0.7
        tokens[:, place] = torch.where(
            follow, tokens[:, place - 1] * 5 % VOCABULARY, tokens[:, place]
        )
    return tokens


def batches(
    config: TrainerConfig, mesh: Mesh, step: int, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This replica's micro batches of global batch number `step`: the same samples whatever the
    topology.
    """
    tokens, size = samples(config, step, count), config.batch.micro_batch_size
    for index in range(mesh.data_rank, count // size, mesh.data):
        part = tokens[index * size : (index + 1) * size]
        yield part[:, :-1], part[:, 1:]


class Curve(Record):
    """What a short training showed on one rank. `parts`: of each step's loss; `measured`: of the
    evaluation.
    """

    losses: list[float]
    norms: list[float | None]
    parts: list[Mapping[str, float]]
    evaluation: float
    measured: Mapping[str, float]
    params_norm: float
    disagreements: list[str]
    weights: dict[str, Tensor]
    pieces: list[Piece]


def train_in_fp16(config: TrainerConfig) -> Curve:
    """`train` where DeepSpeed does not believe that this processor computes in fp16 (torch's
    kernels do).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: True)
        return train(config)


def train(
    config: TrainerConfig, sizes: tuple[int, ...] = RAMP, draw: Callable[..., Any] = batches
) -> Curve:
    """Train one step per entry of `sizes` (global batch sizes) on this rank; to be run by
    `run_ranks`.

    `draw`: gives the micro batches, as `batches` does.
    """
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    results = []
    for step, size in enumerate(sizes):
        engine.set_learning_rate(3e-3 * min(1.0, (step + 1) / 5))
        results.append(engine.train_step(draw(config, mesh, step, size), size))
    evaluation = engine.measure(
        draw(config, mesh, 1000, 8), 8 // config.batch.micro_batch_size // mesh.data
    )
    curve = Curve(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        [result.parts for result in results],
        evaluation.loss,
        evaluation.parts,
        engine.params_norm(),
        engine.disagreeing_parameters(),
        {weight.name: weight.tensor.clone() for weight in engine.sharded_state().weights},
        copy_state(engine),
    )
    engine.close()
    return curve


Logical = dict[str, dict[str, Tensor]]


class Piece(Record):
    """A copy of one rank's share of a logical tensor: `elements` of the flattened slice from
    `start` on.
    """

    name: str
    whole: tuple[int, ...]
    local: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    elements: dict[str, Tensor]
    is_owner: bool


def copy_state(engine: Engine) -> list[Piece]:
    """Copies of everything this rank holds: weights under the kind `weight`, then the optimizer's
    fragments.
    """
    state = engine.sharded_state()
    pieces = [
        Piece(
            weight.name, weight.global_shape, tuple(weight.tensor.shape), weight.offsets, 0,
            {"weight": weight.tensor.flatten().clone()}, weight.is_owner,
        )
        for weight in state.weights
    ]  # fmt: skip
    for part in state.fragments:
        elements = {kind: view.clone() for kind, view in part.tensors.items()}
        pieces.append(
            Piece(
                part.name,
                part.global_shape,
                part.local_shape,
                part.offsets,
                part.start,
                elements,
                part.is_owner,
            )
        )
    return pieces


def _window(offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))


def equal(one: Logical, other: Logical) -> bool:
    """Whether two whole states are the same bit for bit."""
    assert one.keys() == other.keys()
    return all(
        torch.equal(one[name][kind], other[name][kind]) for name in one for kind in one[name]
    )


def assemble(ranks: list[list[Piece]]) -> Logical:
    """Whole logical tensors by name and kind, from the owners' pieces of all ranks; checks that
    nothing is missing.
    """
    tensors: Logical = {}
    for piece in (piece for pieces in ranks for piece in pieces if piece.is_owner):
        for kind, elements in piece.elements.items():
            whole = tensors.setdefault(piece.name, {}).setdefault(
                kind, torch.full(piece.whole, float("nan"))
            )
            local = whole[_window(piece.offsets, piece.local)].clone().flatten()
            local[piece.start : piece.start + elements.numel()] = elements.float()
            whole[_window(piece.offsets, piece.local)] = local.view(piece.local)
    for name, kinds in tensors.items():
        assert {"exp_avg", "exp_avg_sq", "fp32", "weight"} <= kinds.keys(), name
        assert not any(tensor.isnan().any() for tensor in kinds.values()), name
    return tensors


def fill(engine: Engine, tensors: Logical, steps: int) -> None:
    """Write whole logical tensors into an engine of any topology, as a checkpoint's load does."""
    state = engine.sharded_state()
    for weight in state.weights:
        window = _window(weight.offsets, tuple(weight.tensor.shape))
        weight.tensor.copy_(tensors[weight.name]["weight"][window])
    for part in state.fragments:
        for kind, view in part.tensors.items():
            local = tensors[part.name][kind][_window(part.offsets, part.local_shape)].flatten()
            view.copy_(local[part.start : part.start + part.numel])
    engine.finish_load(ShardedState(state.weights, state.fragments, steps))

"""The memory that a card is told to need, against bytes that torch's allocator really gave out."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import CPU, batches, tiny
from spawn import run_ranks
from torch.profiler import ProfilerActivity, profile

from trainer.config import TrainerConfig
from trainer.engine import Engine
from trainer.mesh import Mesh
from trainer.model import flops
from trainer.model.memory import Shape, stage_memory, worker_memory

SIZE = 8
STATE = ("weights", "fp32 master weights", "moments")  # and bf16's gradients, which have a buffer of their own


@dataclass(frozen=True)
class Counted:
    """One rank. `built`: bytes held before the first step; `peak`: the most at any time, of two steps."""

    stage: int
    built: int
    peak: int


def count(cards: list[TrainerConfig]) -> list[Counted]:
    """Two steps of each card, every allocation watched; to be run by `run_ranks`."""
    return [_count(config) for config in cards]


def _count(config: TrainerConfig) -> Counted:
    mesh = Mesh.create(config.parallel, CPU)
    gc.collect()  # what the card before left must not be freed below
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        engine = Engine.build(config, mesh)
        with torch.profiler.record_function("built"):
            pass
        for step in range(2):
            engine.train_step(batches(config, mesh, step, SIZE), SIZE)
    assert record.profiler is not None
    held = peak = built = 0
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "built":
            built = held
        elif event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    engine._pipeline.destroy()
    return Counted(mesh.pipeline_rank, built, peak)


def card(vocabulary: int, dtype: str = "bf16", pipeline: int = 1, tensor: int = 1, **model: Any) -> TrainerConfig:
    value = tiny(pipeline, tensor, dtype, **model).model_dump(mode="json")
    value["batch"]["global_batch_size"] = SIZE
    value["tokenizer"]["padded_vocabulary_size"] = vocabulary
    return TrainerConfig.model_validate(value)


def shape_of(config: TrainerConfig, data_parallel: int) -> Shape:
    return Shape(
        config.model, config.parallel, config.batch, config.precision, config.optimizer,
        config.tokenizer.padded_vocabulary_size, data_parallel, "dense", "cpu",
    )  # fmt: skip


NARROW = {"hidden_size": 128, "sequence_length": 256}  # activations weigh as much as the state
ALONE = {
    "logits": card(8192, **NARROW),
    "recomputed": card(8192, layers=6, activation_checkpointing=True, **NARROW),
    "some recomputed": card(64, layers=6, activation_checkpointing=True, recompute_blocks=2, **NARROW),
    "attention recomputed": card(
        64, layers=3, activation_checkpointing=True, recompute_granularity="selective", **NARROW
    ),
    "activations": card(64, hidden_dropout=0.1, **NARROW),
    "fp32": card(64, "fp32", hidden_size=256, sequence_length=128),
}
CUT = {"three axes": card(64, pipeline=2, tensor=2, layers=4, hidden_size=256, sequence_length=128)}


@pytest.mark.parametrize(
    ("cards", "world", "bounds"), [(ALONE, 1, (0.98, 1.08)), (CUT, 4, (0.96, 1.10))], ids=["one-rank", "four-ranks"]
)
def test_the_count_is_what_is_allocated(
    cards: dict[str, TrainerConfig], world: int, bounds: tuple[float, float]
) -> None:
    """The state is right but for the padding of partitions. The peak is compared with that of the stage's rank that
    reached most: a profiler does not hear of what the threads of collectives free, a few messages' worth.
    """
    ranks = run_ranks(count, world, list(cards.values()))
    for number, (name, config) in enumerate(cards.items()):
        shape = shape_of(config, world // (config.parallel.pipeline * config.parallel.tensor))
        stages = flops.stage_layout(config.model, config.parallel, shape.vocabulary)
        assert stages is not None
        for stage in stages:
            found = [rank[number] for rank in ranks if rank[number].stage == stage.index]
            counted = stage_memory(shape, stage, SIZE)
            names = STATE if config.precision.dtype != "bf16" else (*STATE, "gradients")
            state = sum(part.bytes for part in counted.parts if part.name in names)
            assert [rank.built for rank in found] == pytest.approx([state] * len(found), rel=2e-3), name
            ratio = counted.total / max(rank.peak for rank in found)
            assert bounds[0] <= ratio <= bounds[1], (name, stage.index, ratio)


def test_parts_are_those_of_the_stage_that_needs_most() -> None:
    """More replicas share the optimizer, more stages hold more micro batches back, smaller ones hold less of each."""
    config = CUT["three axes"]
    alone, shared = (worker_memory(shape_of(config, degree)) for degree in (1, 4))
    assert alone is not None and shared is not None
    assert alone.stage == 0  # two micro batches on the way there, one on the last stage
    parts = {part.name: part.bytes for part in alone.parts}
    less = {part.name: part.bytes for part in shared.parts}
    assert less["moments"] * 4 == pytest.approx(parts["moments"], rel=1e-6)
    assert (less["weights"], less["gradients"]) == (parts["weights"], parts["gradients"])
    assert alone.total == sum(parts.values()) and alone.largest.bytes == max(parts.values())
    unknown = config.parallel.model_copy(update={"partition": "parameters"})
    assert worker_memory(shape_of(config.model_copy(update={"parallel": unknown}), 1)) is None

"""Models as transformers and as this trainer save them, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.trainer.cases import CPU, tiny
from trainer.checkpoint import randomness, store
from trainer.checkpoint.huggingface.bloom import BLOOM
from trainer.checkpoint.huggingface.import_ import HuggingFaceFolder
from trainer.checkpoint.publishing import CheckpointInfo, Extras, NewCheckpoint
from trainer.checkpoint.rewrite import write_checkpoint
from trainer.config.card import TrainerConfig
from trainer.contract.resumable import model_facts
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh

EXTRAS = Extras({"iteration": 0, "consumed_samples": 0, "consumed_tokens": 0})


def card(heads: int, pipeline: int = 1, tensor: int = 1, dtype: str = "fp32") -> TrainerConfig:
    """48 wide; heads that are no power of two, cut over two tensor ranks, take ALiBi slopes of both
    kinds.
    """
    config = tiny(
        pipeline,
        tensor,
        dtype,
        hidden_size=48,
        attention_heads=heads,
        sequence_length=24,
        init_std=0.2,
    )
    return config.model_copy(
        update={"batch": config.batch.model_copy(update={"micro_batch_size": 1})}
    )


def made_by_transformers(heads: int = 6, vocabulary: int = 64) -> Any:
    """A BLOOM with random weights, biases and norms away from their trivial start too."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(11)
    shape = BloomConfig(
        vocab_size=vocabulary, hidden_size=48, n_layer=2, n_head=heads, initializer_range=0.2
    )
    model = BloomForCausalLM(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def train_and_save(config: TrainerConfig, folder: Path, draw: Callable[..., Any]) -> float:
    """Three steps and a save; the loss of four samples afterwards. To be run by `run_ranks`."""
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    for step in range(3):
        engine.set_learning_rate(1e-2)
        engine.train_step(draw(config, mesh, step, 8), 8)
    extras = Extras(EXTRAS.cursor, randomness.capture())
    store.save(
        NewCheckpoint(folder, 3, extras, CheckpointInfo(mesh.degrees(), model_facts(config))),
        engine.sharded_state(),
    )
    loss = engine.measure(draw(config, mesh, 9, 4), 1).loss
    engine.close()
    return loss


def make_checkpoint(model: Path, folder: Path, dtype: str) -> Path:
    source = HuggingFaceFolder(model, BLOOM, dtype)
    return write_checkpoint(
        NewCheckpoint(folder, 0, EXTRAS, CheckpointInfo(source.facts.topology, source.facts.model)),
        source,
    )

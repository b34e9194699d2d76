"""A second engine, torch's own pipeline schedules, drives the same layers: same losses, norms and
weights.

It shares with `trainer.engine` the layers and nothing else: DeepSpeed's pipeline, ZeRO and clipping
are replaced by torch.distributed.pipelining, torch.optim.AdamW and the few sums below.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tests.trainer.cases import CPU, samples, tiny
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.engine import Engine
from trainer.model.family import (
    TIED_NAME,
    Layer,
    initialise_stage,
    logical_parameters,
    replicated_parameters,
)
from trainer.model.gpt import GPTFamily
from trainer.model.loss import LanguageModelHead
from trainer.optim.build import parameter_groups
from trainer.parallel.mesh import Mesh
from trainer.parallel.replica_check import disagreements
from trainer.parallel.shard import sharding_of

SIZE, STEPS, RATE = 16, 6, 3e-3
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
Answer = tuple[list[float], list[float], dict[str, Tensor]]


def card(tensor: int, sequence_parallel: bool = False, **model: Any) -> TrainerConfig:
    config = tiny(2, tensor, **model)
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={"sequence_parallel": sequence_parallel})
        }
    )


def micro_batches(config: TrainerConfig, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    for rows in samples(config, step, SIZE).split(config.batch.micro_batch_size):
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def by_deepspeed(config: TrainerConfig) -> Answer:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    engine.set_learning_rate(RATE)
    results = [engine.train_step(micro_batches(config, step), SIZE) for step in range(STEPS)]
    weights = {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}
    engine.close()
    return (
        [result.loss for result in results],
        [result.grad_norm or 0.0 for result in results],
        weights,
    )


class Stage(nn.Module):
    """The layers of one of two stages, in order: those before the middle block, or the rest."""

    def __init__(self, config: TrainerConfig, mesh: Mesh, head: LanguageModelHead):
        super().__init__()
        layers = GPTFamily().layers(config, mesh, head, None)
        middle = next(index for index, layer in enumerate(layers) if layer.prefix == "blocks.1.")
        self.layers: list[Layer] = layers[:middle] if mesh.is_first_stage else layers[middle:]
        self.built = nn.ModuleList(layer.kind(*layer.arguments) for layer in self.layers)
        self.named = [
            (layer.prefix, module) for layer, module in zip(self.layers, self.built, strict=True)
        ]
        initialise_stage(self.named, config.run.seed, mesh)

    def forward(self, stream: Tensor) -> Tensor:
        for layer, module in zip(self.layers, self.built, strict=True):
            stream = module(stream) if layer.forward is None else layer.forward(module, stream)
        return stream


def join_gradients(stage: Stage, mesh: Mesh) -> None:
    """Add what lies apart: the tied weight's gradients on both stages, replicated ones' shares over
    tensor ranks.
    """
    tied = dict(logical_parameters(stage.named))[TIED_NAME]
    assert tied.grad is not None
    dist.all_reduce(tied.grad, group=mesh.pipeline_group)
    for parameter in replicated_parameters([stage]) if mesh.tensor_group is not None else ():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=mesh.tensor_group)


def clip(stage: Stage, mesh: Mesh, most: float) -> float:
    """Scale all gradients so that their norm, each whole parameter counted once, is `most` at most."""
    total = torch.zeros(())
    for name, parameter in logical_parameters(stage.named):
        is_first = sharding_of(parameter).dim is not None or mesh.tensor_rank == 0
        if parameter.grad is not None and is_first and (name != TIED_NAME or mesh.is_first_stage):
            total += parameter.grad.square().sum()
    dist.all_reduce(total, group=mesh.model_group)
    norm = total.sqrt().item()
    for parameter in stage.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(min(1.0, most / (norm + 1e-6)))
    return norm


def by_torch(config: TrainerConfig, schedule_name: str) -> Answer:
    mesh = Mesh.create(config.parallel, CPU)
    head = LanguageModelHead(mesh)
    stage = Stage(config, mesh, head)
    count = SIZE // config.batch.micro_batch_size
    pipe = PipelineStage(stage, mesh.pipeline_rank, mesh.pipeline, CPU, group=mesh.pipeline_group)
    schedule = SCHEDULES[schedule_name](pipe, count, loss_fn=head.loss)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        parameter_groups(logical_parameters(stage.named), settings.weight_decay),
        lr=RATE, betas=(settings.beta1, settings.beta2), eps=settings.epsilon,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(STEPS):
        pairs = list(micro_batches(config, step))
        tokens, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        each: list[Tensor] = []
        if mesh.is_first_stage:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=each)
        join_gradients(stage, mesh)
        norms.append(clip(stage, mesh, settings.clip_grad))
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(each).mean() if each else torch.zeros(())
        dist.broadcast(loss, mesh.pipeline_ranks[-1], group=mesh.pipeline_group)
        losses.append(loss.item())
    parameters = list(logical_parameters(stage.named))
    assert disagreements(parameters, mesh, TIED_NAME) == []
    return losses, norms, {name: parameter.detach().clone() for name, parameter in parameters}


@pytest.mark.parametrize(
    ("schedule", "tensor", "sequence_parallel", "positions"),
    [
        ("gpipe", 1, False, "alibi"),
        ("1f1b", 1, False, "absolute"),
        ("gpipe", 2, True, "rotary"),
        ("1f1b", 2, False, "alibi"),
    ],
)
def test_two_engines_train_alike(
    schedule: str, tensor: int, sequence_parallel: bool, positions: str
) -> None:
    config = card(tensor, sequence_parallel, position_embedding=positions)
    ours, theirs = (
        run_ranks(by_deepspeed, 2 * tensor, config),
        run_ranks(by_torch, 2 * tensor, config, schedule),
    )
    for (losses, norms, weights), (other_losses, other_norms, other_weights) in zip(
        ours, theirs, strict=True
    ):
        # it learns, every step clips
        assert losses[-1] < losses[0] - 0.1 and min(norms) > config.optimizer.clip_grad
        torch.testing.assert_close(other_losses, losses, atol=2e-6, rtol=0)
        torch.testing.assert_close(other_norms, norms, atol=0, rtol=1e-5)
        assert other_weights.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(other_weights[name], weight, atol=1e-5, rtol=1e-5)

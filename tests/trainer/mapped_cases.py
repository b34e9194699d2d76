"""A model of `transformers` and one of ours with the same weights, trained on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.cases import CPU, fill
from tests.trainer.spawn import run_ranks
from trainer.checkpoint.huggingface.mapped import MappedTensor
from trainer.checkpoint.source import TensorFacts
from trainer.config.card import TrainerConfig
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh
from trainer.pipeline.partial_losses import Measured

STEPS = 3


def weights_as_ours(
    items: Mapping[str, MappedTensor], given: Mapping[str, Tensor], groups: int
) -> dict[str, Tensor]:
    """Theirs under our names: what is one weight in ours is put together again."""
    parts: dict[str, list[tuple[MappedTensor, Tensor]]] = {}
    for name, item in items.items():
        value = given[name]
        parts.setdefault(item.key, []).append((item, value.view(value.shape[item.leading :])))
    return {key: _joined(own, groups) for key, own in parts.items()}


def _joined(parts: list[tuple[MappedTensor, Tensor]], groups: int) -> Tensor:
    item, value = parts[0]
    if item.part is None:
        return value
    assert sum(each.count for each, _ in parts) == item.parts
    if item.is_stacked:
        return torch.stack([each for _, each in parts])
    cut = [each.view(groups, own.count, -1, *each.shape[1:]) for own, each in parts]
    return torch.cat(cut, dim=1).reshape(-1, *value.shape[1:])


def weight_as_theirs(item: MappedTensor, ours: Tensor, groups: int) -> Tensor:
    """What the export would write of our tensor."""
    shape = item.shape(tuple(ours.shape))
    windows = (
        tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        for offsets, sizes in item.blocks(TensorFacts(shape, ours.dtype), groups)
    )
    whole = torch.cat([ours[window].flatten() for window in windows])
    return whole.view(*[1] * item.leading, *shape)


def train_theirs(model: Any, loss_of: Callable[[int], Tensor]) -> list[float]:
    """The loss of each of `STEPS` steps of AdamW; no decay of vectors, as in ours."""
    vectors = [item for item in model.parameters() if item.dim() < 2 or item.shape[0] == 1]
    rest = [item for item in model.parameters() if all(item is not other for other in vectors)]
    optimizer = torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3
    )
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_ours(
    config: TrainerConfig, given: dict[str, Tensor], draw: Callable[..., Any]
) -> tuple[Measured, list[float], dict[str, Tensor]]:
    """What is measured before, and losses of as many steps of one micro batch each, from their
    weights; the weights afterwards.
    """
    zeros = {name: torch.zeros_like(value) for name, value in given.items()}
    tensors = {
        name: {"weight": value, "fp32": value, "exp_avg": zeros[name], "exp_avg_sq": zeros[name]}
        for name, value in given.items()
    }
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    fill(engine, tensors, 0)
    engine.set_learning_rate(1e-3)
    before = engine.measure(draw(config, mesh, 0, 8), 1)
    losses = [engine.train_step(draw(config, mesh, step, 8), 8).loss for step in range(STEPS)]
    weights = {weight.name: weight.tensor.clone() for weight in engine.sharded_state().weights}
    engine.close()
    return before, losses, weights


def compare_training(
    config: TrainerConfig,
    model: Any,
    items: Mapping[str, MappedTensor],
    loss_of: Callable[[int], Tensor],
    draw: Callable[..., Any],
    measured: Mapping[str, float] | None = None,
) -> None:
    """Loss before, of three AdamW steps, and every weight after them but the key biases, whose true
    gradient is zero.
    """
    groups = config.model.groups
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    given = weights_as_ours(items, state, groups)
    losses = train_theirs(model, loss_of)
    ((before, ours, weights),) = run_ranks(train_ours, 1, config, given, draw)
    assert abs(before.loss - losses[0]) <= 2e-6
    assert before.parts == pytest.approx(measured or {}, abs=2e-6, rel=0)
    torch.testing.assert_close(ours, losses, atol=5e-6, rtol=0)
    after = model.state_dict()
    for name, item in items.items():
        if not name.endswith(("key.bias", "k_proj.bias")):
            mine = weight_as_theirs(item, weights[item.key], groups)
            torch.testing.assert_close(mine, after[name], atol=2e-5, rtol=0, msg=name)

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
from trainer.config.card import TrainerConfig
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh
from trainer.pipeline.partial_losses import Measured

STEPS = 3


def weights_as_ours(items: Mapping[str, MappedTensor], given: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Theirs under our names: what is one matrix in ours is put together again."""
    parts: dict[str, list[Tensor]] = {}
    for name, item in items.items():
        value = given[name]
        parts.setdefault(item.key, []).append(value.view(value.shape[item.leading :]))
    many = {item.key: item.parts for item in items.values() if item.part is not None}
    found = {}
    for key, values in parts.items():
        found[key] = values[0]
        if key in many:
            assert len(values) == many[key]
            cut = [part.view(heads, 1, -1, *part.shape[1:]) for part in values]
            found[key] = torch.cat(cut, dim=1).reshape(-1, *values[0].shape[1:])
    return found


def weight_as_theirs(item: MappedTensor, ours: Tensor, heads: int) -> Tensor:
    """What the export would write of our tensor."""
    rows = item.rows(heads)
    if rows is not None:
        cut = rows.blocks(item.shape(tuple(ours.shape)))
        ours = torch.cat([ours[offsets[0] : offsets[0] + sizes[0]] for offsets, sizes in cut])
    return ours.view(*[1] * item.leading, *ours.shape)


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
    """What is measured before, and losses of as many steps of one micro batch each, from their weights; the weights afterwards."""
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
    """Loss before, of three AdamW steps, and every weight after them but the key biases, whose true gradient is zero."""
    heads = config.model.attention_heads
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    given = weights_as_ours(items, state, heads)
    losses = train_theirs(model, loss_of)
    ((before, ours, weights),) = run_ranks(train_ours, 1, config, given, draw)
    assert abs(before.loss - losses[0]) <= 2e-6
    assert before.parts == pytest.approx(measured or {}, abs=2e-6, rel=0)
    torch.testing.assert_close(ours, losses, atol=5e-6, rtol=0)
    after = model.state_dict()
    for name, item in items.items():
        if not name.endswith(("key.bias", "k_proj.bias")):
            mine = weight_as_theirs(item, weights[item.key], heads)
            torch.testing.assert_close(mine, after[name], atol=2e-5, rtol=0, msg=name)

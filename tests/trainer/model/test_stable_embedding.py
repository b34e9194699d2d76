"""The three keys that make bitsandbytes' StableEmbedding, beside what its own class did.

    optimizer.type = "adam8bit"   optimizer.embedding_init = "xavier"   model.embedding_layernorm = true

Recorded by tests/data/adam8bit/record_embedding.py from bitsandbytes 0.50.2.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainer.cases import CPU, tiny
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.engine import Engine
from trainer.model.initial import initialise, xavier_bound
from trainer.model.layers import LayerNorm, VocabularyParallelEmbedding
from trainer.optim.adam8bit import Adam8bit, FullMoment
from trainer.parallel.mesh import Mesh

RECORDED = Path(__file__).parents[2] / "data" / "adam8bit" / "stable_embedding.npz"
WIDE = (4096, 64)


@pytest.fixture(scope="module")
def theirs() -> dict[str, Tensor]:
    with np.load(RECORDED) as held:
        return {name: torch.from_numpy(held[name]) for name in held.files if name != "version"}


def looked_up(tensor: int, theirs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the recorded weights: the result, and the gradients of this rank's rows and of the
    LayerNorm.
    """
    mesh = Mesh.create(tiny(1, tensor).parallel, CPU)
    rows, columns = theirs["at_weight"].shape
    embedding, norm = (
        VocabularyParallelEmbedding(rows, columns, 1.0, mesh),
        LayerNorm(columns, 1e-5, mesh),
    )
    with torch.no_grad():
        embedding.weight.copy_(theirs["at_weight"].chunk(tensor)[mesh.tensor_rank])
        norm.weight.copy_(theirs["at_norm.weight"])
        norm.bias.copy_(theirs["at_norm.bias"])
    result = norm(embedding(theirs["tokens"]))
    result.backward(theirs["upstream"])
    weight, scale, shift = embedding.weight.grad, norm.weight.grad, norm.bias.grad
    assert weight is not None and scale is not None and shift is not None
    return result.detach(), weight, scale, shift


@pytest.mark.parametrize("tensor", [1, 2])
def test_it_is_bitsandbytes_on_every_number_of_ranks(
    tensor: int, theirs: dict[str, Tensor]
) -> None:
    ranks = run_ranks(looked_up, tensor, tensor, theirs)
    for result, *_ in ranks:
        torch.testing.assert_close(result, theirs["result"], rtol=0, atol=1e-6)
    _, weights, scales, shifts = zip(*ranks, strict=True)
    torch.testing.assert_close(torch.cat(weights), theirs["grad_weight"], rtol=0, atol=1e-5)
    # each has a share
    torch.testing.assert_close(sum(scales), theirs["grad_norm.weight"], rtol=0, atol=1e-5)
    torch.testing.assert_close(sum(shifts), theirs["grad_norm.bias"], rtol=0, atol=1e-5)


def test_it_begins_as_bitsandbytes_does(theirs: dict[str, Tensor]) -> None:
    embedding = VocabularyParallelEmbedding(*WIDE, 1.0, Mesh.single(CPU))
    initialise("embedding.word.weight", embedding.weight, 5, 0, is_xavier=True)
    bound, weight = xavier_bound(*WIDE), embedding.weight.detach()
    for largest in (float(weight.abs().max()), float(theirs["largest"])):
        assert 0.999 * bound < largest <= bound
    assert (
        float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.01)
        and abs(float(weight.mean())) < 1e-3
    )


def test_its_moments_are_in_fp32(theirs: dict[str, Tensor]) -> None:
    assert int(theirs["state_bytes"]) == 4
    config = tiny(hidden_size=64)
    changes = {
        "optimizer": config.optimizer.model_copy(
            update={"type": "adam8bit", "embedding_init": "xavier"}
        )
    }
    ((kind, largest),) = run_ranks(of_embedding, 1, config.model_copy(update=changes))
    bound = xavier_bound(64, 64)
    assert kind is FullMoment and 0.99 * bound < largest <= bound


def of_embedding(config: TrainerConfig) -> tuple[type, float]:
    """How the word embedding's moments are held, and its largest weight."""
    engine = Engine.build(config, Mesh.create(config.parallel, CPU))
    optimizer = engine._optimizer
    assert isinstance(optimizer, Adam8bit)
    runs = {name: run for state in optimizer.state.values() for name, run in state["runs"].items()}
    largest = dict(engine.named_parameters())["embedding.word.weight"].detach().abs().max()
    engine.close()
    return type(runs["embedding.word.weight"].moments[0]), float(largest)

"""Norms of each layer at a step: what they are, on every shape, and what they cost."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.trainer.cases import CPU, assemble, batches, copy_state, tiny
from tests.trainer.llama_cases import LLAMA
from tests.trainer.softmax_ways import WAYS, take
from tests.trainer.spawn import run_ranks
from trainer.config.card import ParallelSection, TrainerConfig
from trainer.contract.metrics_record import LayerMeasure
from trainer.contract.record import Record
from trainer.engine import Engine
from trainer.model.layers import VocabularyParallelEmbedding
from trainer.model.loss import LanguageModelHead
from trainer.model.matmul import compute_dtype
from trainer.optim.interface import PartitionShare
from trainer.optim.layer_norms import LayerNorms, layer_of
from trainer.parallel.mesh import Mesh
from trainer.schedule.flops import PIECE_ELEMENTS, SOFTMAX_ELEMENTS

EVERY = 2
STEPS = 4


class Seen(Record):
    """One rank: each step's measure, its gradient norm, and the masters by name before and after
    each step.
    """

    measures: list[LayerMeasure | None]
    norms: list[float | None]
    masters: list[list[object]]


def card(
    pipeline: int = 1, tensor: int = 1, every: int | None = EVERY, dtype: str = "fp32"
) -> TrainerConfig:
    config = tiny(pipeline, tensor, dtype, **LLAMA | {"activation_checkpointing": tensor == 2})
    logging = config.logging.model_copy(update={"layer_norms_interval": every})
    cut = config.parallel.model_copy(update={"sequence_parallel": pipeline == 2 and tensor == 2})
    return config.model_copy(update={"logging": logging, "parallel": cut})


def look(config: TrainerConfig) -> Seen:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    measures, norms, masters = [], [], [copy_state(engine)]
    for step in range(STEPS):
        engine.set_learning_rate(1e-2)
        found = engine.train_step(batches(config, mesh, step, 8), 8, step)
        measures.append(found.layers)
        norms.append(found.grad_norm)
        masters.append(copy_state(engine))
    engine.close()
    return Seen(measures, norms, masters)


@cache
def seen(pipeline: int, tensor: int, data: int) -> list[Seen]:
    return run_ranks(look, pipeline * tensor * data, card(pipeline, tensor))


def by_layer(values: dict[str, Tensor]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, value in values.items():
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + float(
            value.double().square().sum()
        )
    return {layer: math.sqrt(total) for layer, total in squares.items()}


def test_each_is_the_norm_of_what_it_says() -> None:
    """Updates and weights against the masters themselves; gradients add up to the whole norm,
    before clipping.
    """
    (found,) = seen(1, 1, 1)
    assert [measure is not None for measure in found.measures] == [False, True, False, True]
    whole = [assemble([pieces]) for pieces in found.masters]  # type: ignore[list-item]
    for step in (1, 3):
        measure = found.measures[step]
        assert measure is not None
        assert measure.layers == ("embedding", "blocks.0", "blocks.1", "final_norm", "head")
        after = {name: kinds["fp32"] for name, kinds in whole[step + 1].items()}
        moved = {name: value - whole[step][name]["fp32"] for name, value in after.items()}
        weights, updates = by_layer(after), by_layer(moved)
        assert measure.weight == pytest.approx(
            [weights[layer] for layer in measure.layers], rel=1e-6
        )
        assert measure.update == pytest.approx(
            [updates[layer] for layer in measure.layers], rel=1e-4
        )
        assert math.hypot(*measure.gradient) == pytest.approx(found.norms[step], rel=1e-6)
        # it was clipped
        assert all(value > 0 for value in measure.gradient) and found.norms[step] > 0.3
        assert [math.isnan(value) for value in measure.output] == [True, False, False, True, True]


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (2, 2, 2)], ids=str)
def test_every_shape_measures_the_same(shape: tuple[int, int, int]) -> None:
    """With recomputed blocks where tensor is 2, with sequence parallelism on eight ranks; all ranks
    are told the same.
    """
    (alone,), ranks = seen(1, 1, 1), seen(*shape)
    for step in (1, 3):
        reference = alone.measures[step]
        assert reference is not None
        for rank in ranks:
            measure = rank.measures[step]
            assert measure is not None and measure.layers == reference.layers
            for name in ("gradient", "update", "weight", "output"):
                mine, right = getattr(measure, name), getattr(reference, name)
                assert mine == pytest.approx(right, rel=2e-4, nan_ok=True), (name, shape)


class Threes(torch.nn.Module):
    """A block that hands on threes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 3.0 * torch.ones_like(hidden)


def test_what_a_block_hands_on_is_its_root_mean_square() -> None:
    block, weight = Threes(), torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    norms = LayerNorms(optimizer, Mesh.single(CPU), [("blocks.0.", block)])
    norms.locate(
        {id(weight): [PartitionShare("blocks.0.weight", 0, 0, 4, 0, (4,))]}, ["blocks.0.weight"]
    )
    block(torch.zeros(2, 3, 4))  # before anything is measured
    norms.begin()
    for _ in range(3):
        block(torch.zeros(2, 3, 4))
    weight.grad = torch.ones(4)
    optimizer.step()
    found = norms.take(8.0)  # four times what is left after clipping
    assert found is not None and found.output == pytest.approx([3.0])
    assert (found.gradient, found.update, found.weight) == ((8.0,), (1.0,), (1.0,))
    norms.begin()
    assert norms.take(8.0) is None  # no update was made


def test_in_bf16_gradients_add_up_too() -> None:
    (found,) = run_ranks(look, 1, card(dtype="bf16"))
    measure = found.measures[1]
    assert measure is not None and math.hypot(*measure.gradient) == pytest.approx(
        found.norms[1], rel=1e-3
    )
    assert all(
        0 < update < weight for update, weight in zip(measure.update, measure.weight, strict=True)
    )


def test_no_step_pays_that_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By counts: copies of the partition, and sums over it, are made at the measured steps alone."""
    plain, measured = (run_ranks(counted, 1, card(every=every))[0] for every in (None, EVERY))
    assert plain == [0] * STEPS
    assert [count > 0 for count in measured] == [False, True, False, True]


def counted(config: TrainerConfig) -> list[int]:
    """Calls of the sum of squares in each step."""
    from trainer.optim import layer_norms

    calls = 0
    own = layer_norms.square_sum

    def count(tensor: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return own(tensor)

    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_norms, "square_sum", count)
        for step in range(STEPS):
            calls = 0
            engine.train_step(batches(config, mesh, step, 8), 8, step)
            found.append(calls)
    engine.close()
    return found


def test_it_changes_no_bit() -> None:
    (plain,) = run_ranks(look, 1, card(every=None))
    (found,) = seen(1, 1, 1)
    assert plain.norms == found.norms and plain.measures == [None] * STEPS


# ----------------------------------------------------------------------------- loss shares
# The loss over tensor ranks, against fp64 on one: also where a label's rank has next to none of
# the probability.

WORDS, HIDDEN, TOKENS = 64, 16, 48
# Of the gradients, relative: twice the unit in the last place, and in fp32 what it makes of logits
# of 300.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, table and labels, in values that `dtype` has. Each fourth label has a logit
    far below the others: its rank has e^-30 of the probability, or e^-300.
    """
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(1, TOKENS, HIDDEN, generator=generator)
    table = torch.randn(WORDS, HIDDEN, generator=generator) / 4
    labels = torch.randint(WORDS, (1, TOKENS), generator=generator)
    table[:, 0] = 0.0
    table[: WORDS // 2, 0] = 1.0
    hidden[:, :, 0] = 0.0
    if dtype != torch.float16:  # whose logits end at 65504, and its exponents far before
        hidden[:, ::8, 0], hidden[:, 4::8, 0] = 30.0, 300.0
        labels[:, ::4] = WORDS - 1
    labels[:, 3] = -100
    return hidden.to(dtype), table.to(dtype), labels


def on_ranks() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Loss, and the gradients of hidden states and of this rank's rows: of each dtype, by each way
    to soften.
    """
    mesh = Mesh.create(ParallelSection(tensor=torch.distributed.get_world_size()), CPU)
    return [_computed(mesh, dtype, way) for dtype in BOUNDS for way in WAYS]


def _computed(mesh: Mesh, dtype: torch.dtype, way: str) -> tuple[Tensor, Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        # several pieces, of several strips
        patch.setitem(PIECE_ELEMENTS, "cpu", 20 * WORDS // mesh.tensor)
        patch.setitem(SOFTMAX_ELEMENTS, "cpu", 7 * WORDS // mesh.tensor)
        take(way, patch)
        hidden, table, labels = given(dtype)
        embedding = VocabularyParallelEmbedding(WORDS, HIDDEN, 1.0, mesh).to(dtype)
        first = embedding.first_row
        embedding.weight.data.copy_(table[first : first + len(embedding.weight)])
        head = LanguageModelHead(mesh)
        hidden.requires_grad_()
        found = head.loss(head.attach(embedding, hidden * 1), labels)
        found.backward()
    assert hidden.grad is not None and embedding.weight.grad is not None
    return found.detach(), hidden.grad, embedding.weight.grad


def on_one() -> list[tuple[float, Tensor, Tensor]]:
    """Of each dtype what is expected; on a rank, whose products are those of the others."""
    return [expected(dtype) for dtype in BOUNDS]


def expected(dtype: torch.dtype) -> tuple[float, Tensor, Tensor]:
    """The same in fp64 on one, of logits as this machine rounds them: where it lacks products in
    the dtype, to fp32.
    """
    hidden, table, labels = given(dtype)
    wide, rows = hidden.double().requires_grad_(), table.double().requires_grad_()
    logits = (wide @ rows.t())[0]
    kind = compute_dtype(hidden)
    rounded = logits + ((hidden[0].to(kind) @ table.t().to(kind)).double() - logits).detach()
    found = torch.nn.functional.cross_entropy(rounded, labels[0], ignore_index=-100)
    found.backward()
    assert wide.grad is not None and rows.grad is not None
    return float(found.detach()), wide.grad, rows.grad


def test_loss_and_gradients_over_two_ranks() -> None:
    """Within the rounding of logits and gradients, which are of the dtype; and the ranks agree on
    every bit.
    """
    (references,) = run_ranks(on_one, 1, launch=False)
    first, second = run_ranks(on_ranks, 2)
    cases = [case for case in zip(BOUNDS, references, strict=True) for _ in WAYS]
    for (dtype, (mean, to_hidden, to_rows)), one, other in zip(cases, first, second, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert float(one[0]) == pytest.approx(mean, rel=1e-5), dtype
        for ours, theirs in ((one[1], to_hidden), (torch.cat([one[2], other[2]]), to_rows)):
            assert ours.isfinite().all()
            assert float((ours.double() - theirs).norm()) <= BOUNDS[dtype] * float(theirs.norm()), (
                dtype
            )

"""Activations cut over tensor ranks, along the sequence or for recomputation: the same numbers,
less memory.

Tolerances as in `test_parity.py`: sums are taken in another order, so 2e-6 on losses near 4.2, 1e-5
on gradient norms.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.cases import CPU, Curve, batches, equal, tiny, train
from tests.trainer.resumes import END, HALF, resumed, stretches
from tests.trainer.spawn import RanksFailed, run_ranks
from trainer.config.card import TrainerConfig
from trainer.engine import Engine
from trainer.model.layers import ColumnParallelLinear
from trainer.model.random import DropoutPlaces, dropout
from trainer.parallel.comm import gather_sequence, reduce_scatter_sequence
from trainer.parallel.mesh import Mesh
from trainer.pipeline.stages import recompute_function

SIZE = 8
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


def cut(pipeline: int, tensor: int, dtype: str = "fp32", **model: Any) -> TrainerConfig:
    """The tiny card with sequence parallelism."""
    card = tiny(pipeline, tensor, dtype, **model)
    return card.model_copy(
        update={"parallel": card.parallel.model_copy(update={"sequence_parallel": True})}
    )


@cache
def alone(dtype: str = "fp32", positions: str = "alibi") -> Curve:
    (curve,) = run_ranks(train, 1, tiny(1, 1, dtype, position_embedding=positions))
    return curve


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


def check_copies(ranks: list[Curve]) -> None:
    for rank in ranks:
        assert rank.losses == ranks[0].losses and rank.norms == ranks[0].norms
        assert rank.params_norm == ranks[0].params_norm
        assert rank.disagreements == []


# ----------------------------------------------------------------------------- along the sequence
@pytest.mark.parametrize(
    ("topology", "recompute_blocks", "positions"),
    [
        ((1, 2, 1), False, "alibi"),
        ((1, 4, 1), True, "absolute"),
        ((2, 2, 1), True, "rotary"),
        ((2, 2, 2), False, "alibi"),
    ],
    ids=str,
)
def test_fp32_equals_one_process(
    topology: tuple[int, int, int], recompute_blocks: bool, positions: str
) -> None:
    pipeline, tensor, data = topology
    card = cut(
        pipeline, tensor, activation_checkpointing=recompute_blocks, position_embedding=positions
    )
    ranks = run_ranks(train, pipeline * tensor * data, card)
    check_copies(ranks)
    reference = alone(positions=positions)
    assert furthest(ranks[0].losses, reference.losses) <= 2e-6
    for ours, theirs in zip(ranks[0].norms, reference.norms, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert abs(ranks[0].evaluation - reference.evaluation) <= 2e-6
    for name in ("final_norm.weight", "blocks.1.mlp.down.bias", "blocks.1.input_norm.bias"):
        torch.testing.assert_close(
            ranks[-1].weights[name], reference.weights[name], atol=1e-5, rtol=1e-5
        )


def test_bf16_stays_within_rounding() -> None:
    ranks = run_ranks(train, 4, cut(2, 2, "bf16"))
    check_copies(ranks)
    assert furthest(ranks[0].losses, alone("bf16").losses) <= 2.0**-9 * 4.2 / 8


def growing(config: TrainerConfig) -> tuple[list[float], list[tuple[int, ...]]]:
    """Losses while the samples grow from 4 to 16 tokens, and the shapes that the last stage
    received.
    """
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    losses, shapes = [], []
    for step, length in enumerate((4, 4, 8, 16)):
        losses.append(engine.train_step(batches(config, mesh, step, SIZE), SIZE, step, length).loss)
        received = engine._pipeline.pipe_recv_buf
        shapes.append(() if received is None else tuple(received.shape))
    losses.append(engine.measure(batches(config, mesh, 9, SIZE), SIZE // 2).loss)
    engine.close()
    return losses, shapes


def test_curriculum_and_what_travels_between_stages() -> None:
    ((reference, _),) = run_ranks(growing, 1, tiny())
    ranks = run_ranks(growing, 4, cut(2, 2))
    assert all(furthest(losses, reference) <= 2e-6 for losses, _ in ranks)
    assert ranks[3][1] == [(2, 2, 32), (2, 2, 32), (2, 4, 32), (2, 8, 32)]  # half of each sample


def uneven(config: TrainerConfig) -> None:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    engine.train_step(batches(config, mesh, 0, SIZE), SIZE, 0, 7)


def test_a_length_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(
        RanksFailed, match="a sequence of 7 tokens cannot be cut over 2 tensor ranks"
    ):
        run_ranks(uneven, 2, cut(1, 2))


def collectives() -> dict[str, Tensor]:
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    answers = {}
    for name, collective in (
        ("gather", gather_sequence),
        ("reduce_scatter", reduce_scatter_sequence),
    ):
        given = (torch.arange(24.0).view(2, 4, 3) + 100 * rank).requires_grad_()
        result = collective(given * 1.0, group)
        (
            result * torch.arange(1.0, result.numel() + 1).view_as(result) * (rank + 1)
        ).sum().backward()
        assert given.grad is not None
        answers |= {name: result.detach(), f"{name}.grad": given.grad}
    return answers


def test_collectives_and_their_gradients() -> None:
    first, second = run_ranks(collectives, 2)
    base = torch.arange(24.0).view(2, 4, 3)
    assert torch.equal(first["gather"], torch.cat((base, base + 100), dim=1))
    assert torch.equal(second["gather"], first["gather"])
    weights = torch.arange(1.0, 49.0).view(2, 8, 3)
    assert torch.equal(first["gather.grad"], 3 * weights[:, :4])
    assert torch.equal(second["gather.grad"], 3 * weights[:, 4:])
    assert torch.equal(second["reduce_scatter"], (2 * base + 100)[:, 2:])
    narrow = torch.arange(1.0, 13.0).view(2, 2, 3)
    assert torch.equal(first["reduce_scatter.grad"], torch.cat((narrow, 2 * narrow), dim=1))


def kept_shapes() -> list[tuple[int, ...]]:
    mesh = Mesh.create(cut(1, 2).parallel, CPU)
    layer = ColumnParallelLinear(6, 10, 1.0, mesh)
    kept: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.ones(2, 4, 6, requires_grad=True))
    return kept


def test_a_column_layer_keeps_only_its_stretch() -> None:
    assert run_ranks(kept_shapes, 2) == [[(2, 4, 6), (5, 6)]] * 2


# ----------------------------------------------------------------------------- dropout's masks
@pytest.mark.parametrize(
    ("pipeline", "tensor", "recomputes"), [(1, 4, True), (2, 2, False), (2, 2, True)]
)
def test_hidden_dropout_is_the_same_on_every_shape(
    pipeline: int, tensor: int, recomputes: bool
) -> None:
    """Each stretch is dropped as the whole sequence is by one rank, and by ranks that hold all of
    it.
    """
    drops = {"hidden_dropout": 0.2, "activation_checkpointing": recomputes}
    (alone, *_) = run_ranks(train, pipeline, tiny(pipeline, **drops))
    (dry, *_) = run_ranks(train, pipeline, tiny(pipeline))
    assert furthest(alone.losses, dry.losses) > 1e-3, "dropout changes the training"
    for card in (cut(pipeline, tensor, **drops), tiny(pipeline, tensor, **drops)):
        ranks = run_ranks(train, pipeline * tensor, card)
        check_copies(ranks)
        assert furthest(ranks[0].losses, alone.losses) <= 2e-6
        for ours, theirs in zip(ranks[0].norms, alone.norms, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def dropped_stretch(probability: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Of ones, this rank's stretch, its gradient, and what it keeps for the backward pass."""
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    hidden = torch.full((2, 4, 6), 3.0, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = dropout(hidden, WORDS, probability, torch.distributed.get_rank())
    out.sum().backward()
    assert hidden.grad is not None
    (mask,) = kept
    return out.detach(), hidden.grad, mask


WORDS = torch.tensor([[3, -4], [5, 6]], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stretch_is_dropped_as_the_whole_is(dtype: torch.dtype) -> None:
    whole = dropout(torch.full((2, 8, 6), 3.0, dtype=dtype), WORDS, 0.3, 0)
    assert 0 < int((whole == 0).sum()) < 48
    for rank, (out, gradient, mask) in enumerate(run_ranks(dropped_stretch, 2, 0.3, dtype)):
        expected = whole[:, 4 * rank : 4 * rank + 4]
        assert torch.equal(out, expected) and torch.equal(gradient != 0, expected != 0)
        assert mask.dtype == torch.bool and mask.untyped_storage().nbytes() == mask.numel(), (
            "no more than its own part"
        )


# -------------------------------------------------------------------------- dropout, resume, copies
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resume_with_dropout_is_bitwise_and_copies_stay_equal(dtype: str) -> None:
    card = cut(2, 2, dtype, **DROPOUT)
    others = (
        [cut(2, 2, activation_checkpointing=True, **DROPOUT), tiny(2, 2, **DROPOUT)]
        if dtype == "fp32"
        else []
    )
    whole, *compared = stretches([card, *others], 1, 0, END, None)
    rest = resumed(card, whole.half)
    assert rest.losses == whole.losses[HALF:] and equal(rest.final, whole.final)
    if compared:
        recomputed, uncut = compared
        assert recomputed.losses == whole.losses and equal(recomputed.final, whole.final)
        assert furthest(whole.losses, uncut.losses) <= 2e-6


def seeded(config: TrainerConfig, name: str) -> list[str]:
    """Two steps with dropout, then one bit of one rank's copy changed: what the guard says."""
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    for step in range(2):
        engine.train_step(batches(config, mesh, step, SIZE), SIZE, step)
    assert engine.disagreeing_parameters() == []
    if mesh.rank == 3:
        bits = dict(engine.named_parameters())[name].data.view(-1).view(torch.int32)
        bits[5] ^= 1
    answer = engine.disagreeing_parameters()
    engine.close()
    return answer


@pytest.mark.parametrize("name", ["blocks.1.attention.dense.bias", "embedding.word.weight"])
def test_guard_names_the_copy_whose_last_bit_differs(name: str) -> None:
    assert run_ranks(seeded, 4, cut(2, 2, **DROPOUT), name) == [[name]] * 4


def shares(config: TrainerConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the replicated parameters: this rank's shares after one micro batch, and their
    sums.
    """
    from trainer.model.family import replicated_parameters

    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    module = engine._pipeline.module
    tokens, labels = next(batches(config, mesh, 0, SIZE))
    module.loss_fn(module(tokens), labels).backward()
    gradients = [
        item.grad.clone() for item in replicated_parameters([module]) if item.grad is not None
    ]
    sums = [gradient.clone() for gradient in gradients]
    for gradient in sums:
        torch.distributed.all_reduce(gradient)
    engine.close()
    return gradients, sums


def test_shares_of_replicated_gradients_add_up_to_the_whole() -> None:
    (whole, _), *_ = run_ranks(shares, 1, tiny())
    uncut, stretches = run_ranks(shares, 2, tiny(1, 2)), run_ranks(shares, 2, cut(1, 2))
    # embedding and final norm; in each of two blocks two norms and two biases
    assert len(whole) == 16
    assert all(not gradient.any() for gradient in uncut[1][0])
    assert all(gradient.any() for gradient in stretches[1][0])
    for _, sums in (*uncut, *stretches):
        for ours, theirs in zip(sums, whole, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


# ----------------------------------------------------------------------------- inputs kept in parts
@pytest.mark.parametrize(
    ("pipeline", "tensor", "dtype"), [(1, 2, "fp32"), (2, 2, "fp32"), (1, 4, "bf16")]
)
def test_partitioned_activations_change_no_bit(pipeline: int, tensor: int, dtype: str) -> None:
    plain = tiny(pipeline, tensor, dtype, activation_checkpointing=True, **DROPOUT)
    parts = tiny(
        pipeline,
        tensor,
        dtype,
        activation_checkpointing=True,
        partition_activations=True,
        **DROPOUT,
    )
    one, other = stretches([plain, parts], 1, 0, HALF, None)
    assert other.losses == one.losses and equal(other.final, one.final)


def recomputed() -> tuple[list[tuple[int, ...]], bool, Tensor, Tensor]:
    """What is kept of an input of 2 x 3 x 5, whether it is freed, and the gradients by both ways."""
    import weakref

    card = tiny(1, 2, activation_checkpointing=True, partition_activations=True)
    mesh = Mesh.create(card.parallel, CPU)
    function = recompute_function(card.model, mesh, DropoutPlaces(mesh))
    kept: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    start = torch.linspace(-1.0, 1.0, 30).view(2, 3, 5).requires_grad_()
    hidden = start * 2.0
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = function(lambda item: item.sin() * item, hidden)
    alive = weakref.ref(hidden)
    del hidden
    is_freed = alive() is None
    (ours,) = torch.autograd.grad(output.square().sum(), start)
    doubled = start * 2.0
    (expected,) = torch.autograd.grad((doubled.sin() * doubled).square().sum(), start)
    return kept, is_freed, ours, expected


def test_partitioned_recomputation_keeps_a_part() -> None:
    for kept, is_freed, ours, expected in run_ranks(recomputed, 2):
        assert kept[0] == (15,) and is_freed
        assert all(torch.Size(shape).numel() <= 15 for shape in kept)
        torch.testing.assert_close(ours, expected, atol=0.0, rtol=0.0)

"""The model alone: pieces against plain formulas, and the whole against an independent BLOOM."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional

from tests.trainer.cases import CPU, Logical, batches, fill, samples, tiny
from tests.trainer.softmax_ways import WAYS, take
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.config.model import BLOCK, EMBEDDING, OTHERS
from trainer.engine import Engine
from trainer.model import initial, loss, matmul
from trainer.model.bert import PretrainingHeads, TokenTypes
from trainer.model.block import TransformerBlock
from trainer.model.kernels import DenseKernel
from trainer.model.layers import (
    LayerNorm,
    LearnedPositions,
    RMSNorm,
    VocabularyParallelEmbedding,
    new_parameter,
)
from trainer.model.loss import LanguageModelHead
from trainer.model.positions import alibi_slopes, local_alibi_slopes
from trainer.model.random import Dropout
from trainer.parallel import comm
from trainer.parallel.mesh import Mesh
from trainer.parallel.shard import Sharding, sharding_of

ALONE = Mesh.single(CPU)


def of_tensor_rank(rank: int, degree: int) -> Mesh:
    """One tensor rank's mesh without groups: enough for whatever only computes offsets."""
    return Mesh(pipeline=1, data=1, tensor=degree, rank=rank, device=CPU)


# ----------------------------------------------------------------------------- ALiBi
def test_alibi_slopes_of_eight_heads() -> None:
    assert alibi_slopes(8) == [2.0**-power for power in range(1, 9)]


def test_alibi_slopes_of_112_heads() -> None:
    slopes = alibi_slopes(112)
    assert len(slopes) == 112
    assert (round(slopes[0], 6), round(slopes[64], 6), round(slopes[-1], 6)) == (
        0.917004,
        0.957603,
        0.016317,
    )


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_attention_bias_is_sliced_by_tensor_rank(degree: int) -> None:
    def bias(mesh: Mesh) -> Tensor:
        return DenseKernel(local_alibi_slopes(6, mesh), False, CPU).bias(5, torch.float32)

    whole, parts = bias(ALONE), [bias(of_tensor_rank(rank, degree)) for rank in range(degree)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert whole[0, 2, 4, 1] == pytest.approx(-3 * alibi_slopes(6)[2])
    assert whole[0, 2, 1, 4] == -math.inf


# ----------------------------------------------------------------- declarations and initial weights
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.sampled_from([None, 0, 1]))
def test_slices_tile_the_whole(parts: int, rows: int, columns: int, dim: int | None) -> None:
    sharding = Sharding(dim, parts)
    whole = (rows * parts, columns * parts)
    local = sharding.local_shape(whole)
    assert sharding.global_shape(local) == whole
    seen = torch.zeros(whole)
    for index in range(1 if dim is None else parts):
        first, second = sharding.offsets(local, index)
        seen[first : first + local[0], second : second + local[1]] += 1
    assert seen.eq(1).all()


def test_stages_are_counted_by_the_names_of_the_classes() -> None:
    dealt = (
        VocabularyParallelEmbedding, TransformerBlock, LearnedPositions, LayerNorm, RMSNorm, Dropout, TokenTypes,
        PretrainingHeads,
    )  # fmt: skip
    assert tuple(kind.__name__ for kind in dealt) == (EMBEDDING, BLOCK, *OTHERS)


def test_sharding_refuses_uneven_cuts() -> None:
    with pytest.raises(ValueError, match="cannot be cut into 4 equal parts"):
        Sharding(0, 4).local_shape((6, 2))


def test_undeclared_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="no declared sharding"):
        sharding_of(torch.nn.Parameter(torch.zeros(2)))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([0, 1]), st.integers(1, 300), st.booleans())
def test_initial_weights_are_slices_of_one_tensor(
    degree: int, dim: int, block: int, is_xavier: bool
) -> None:
    shape, kept = (24, 8), initial.BLOCK_ELEMENTS
    initial.BLOCK_ELEMENTS = block
    try:
        parts = []
        for rank in range(degree):
            mesh = of_tensor_rank(rank, degree)
            parts.append(new_parameter(shape, mesh, dim, initial.Initial(0.0, 0.3)))
            initial.initialise("some.weight", parts[-1], 5, rank, is_xavier)
        whole = new_parameter(shape, ALONE, None, initial.Initial(0.0, 0.3))
        initial.initialise("some.weight", whole, 5, 0, is_xavier)
        other = new_parameter(shape, ALONE, None, initial.Initial(0.0, 0.3))
        initial.initialise("other.weight", other, 5, 0, is_xavier)
    finally:
        initial.BLOCK_ELEMENTS = kept
    assert torch.equal(torch.cat([part.detach() for part in parts], dim=dim), whole)
    assert not torch.equal(whole, other)


def begun(tensor: int) -> dict[str, Tensor]:
    """The largest weight of each matrix at the start, and the word embedding."""
    config = tiny(1, tensor)
    stable = {"optimizer": config.optimizer.model_copy(update={"embedding_init": "xavier"})}
    every = {"model": config.model.model_copy(update={"init_method": "xavier"})}
    mesh, found = Mesh.create(config.parallel, CPU), {}
    for name, changes in {"stable": stable, "every": every}.items():
        engine = Engine.build(config.model_copy(update=changes), mesh)
        for key, parameter in engine.named_parameters():
            if parameter.dim() == 2:
                found[f"{name} {key}"] = (
                    parameter.detach().abs().max() if tensor == 1 else parameter.detach().clone()
                )
        found[name] = dict(engine.named_parameters())["embedding.word.weight"].detach().clone()
        engine._pipeline.destroy()
    return found


def test_a_card_chooses_how_matrices_begin() -> None:
    (alone,), halves = run_ranks(begun, 1, 1), run_ranks(begun, 2, 2)
    for name in ("stable", "every"):
        assert torch.equal(torch.cat([half[name] for half in halves]), alone[name])
    assert torch.equal(alone["stable"], alone["every"])
    bounds = {
        "embedding.word": 64 + 32,
        "blocks.0.attention.query_key_value": 96 + 32,
        "blocks.1.mlp.down": 32 + 128,
    }
    for name, sides in bounds.items():
        bound = math.sqrt(6 / sides)
        assert 0.95 * bound < alone[f"every {name}.weight"] <= bound
        assert ("word" in name) == bool(
            alone[f"stable {name}.weight"] == alone[f"every {name}.weight"]
        )


# ----------------------------------------------------------------------------- collectives and loss
def collectives() -> dict[str, Tensor]:
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    answers = {}
    for name in ("copy_to", "reduce_from"):
        given_ = (torch.arange(8.0).view(2, 4) + 10 * rank).requires_grad_()
        result = getattr(comm, f"{name}_tensor_region")(given_ * 1.0, group)
        (
            result * torch.arange(1.0, result.numel() + 1).view_as(result) * (rank + 1)
        ).sum().backward()
        assert given_.grad is not None
        answers |= {name: result.detach(), f"{name}.grad": given_.grad}
    return answers


def test_collectives_and_their_gradients() -> None:
    first, second = run_ranks(collectives, 2)
    base, weights = torch.arange(8.0).view(2, 4), torch.arange(1.0, 9.0).view(2, 4)
    assert torch.equal(second["copy_to"], base + 10)
    assert torch.equal(first["copy_to.grad"], 3 * weights) and torch.equal(
        second["copy_to.grad"], 3 * weights
    )
    assert torch.equal(first["reduce_from"], 2 * base + 10) and torch.equal(
        second["reduce_from"], 2 * base + 10
    )
    assert torch.equal(second["reduce_from.grad"], 2 * weights)


def head_case(mesh: Mesh, dtype: torch.dtype, pieces: int) -> tuple[float, Tensor, Tensor, float]:
    """Loss, gradients of hidden states and of this rank's weight, and the loss without gradients."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 12, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(20, (2, 12), generator=generator)
    embedding = VocabularyParallelEmbedding(20, 16, 1.0, mesh)
    initial.initialise("embedding.word.weight", embedding.weight, 1, mesh.tensor_rank)
    embedding = embedding.to(dtype)
    head = LanguageModelHead(mesh)
    kept = loss.PIECE_ELEMENTS["cpu"], loss.SOFTMAX_ELEMENTS["cpu"]
    loss.PIECE_ELEMENTS["cpu"], loss.SOFTMAX_ELEMENTS["cpu"] = (
        embedding.weight.shape[0] * -(-24 // pieces),
        60,
    )
    try:
        value = head.loss(head.attach(embedding, hidden), labels)
        (3.0 * value).backward()
        with torch.no_grad():
            quiet = head.loss(head.attach(embedding, hidden), labels)
    finally:
        loss.PIECE_ELEMENTS["cpu"], loss.SOFTMAX_ELEMENTS["cpu"] = kept
    assert hidden.grad is not None and embedding.weight.grad is not None
    return value.item(), hidden.grad, embedding.weight.grad, quiet.item()


def head_on_ranks(dtype: torch.dtype, pieces: int, way: str) -> tuple[float, Tensor, Tensor, float]:
    with pytest.MonkeyPatch.context() as patch:
        take(way, patch)
        return head_case(Mesh.create(tiny(1, 2).parallel, CPU), dtype, pieces)


def plain_head(dtype: torch.dtype) -> tuple[float, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 12, 16, generator=generator).to(dtype).float().requires_grad_()
    labels = torch.randint(20, (2, 12), generator=generator)
    weight = new_parameter((20, 16), ALONE, None, initial.Initial(0.0, 1.0))
    initial.initialise("embedding.word.weight", weight, 1, 0)
    rounded = weight.detach().to(dtype).float().requires_grad_()
    value = functional.cross_entropy((hidden @ rounded.t()).flatten(0, 1), labels.flatten())
    (3.0 * value).backward()
    assert hidden.grad is not None and rounded.grad is not None
    return value.item(), hidden.grad, rounded.grad


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_loss_and_gradients_equal_plain_cross_entropy(
    dtype: torch.dtype,
    tolerance: float,
    way: str,
    native: bool,
    pieces: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the device computes in the dtype itself, as a GPU does, or widens to fp32; by each
    way to soften.
    """
    take(way, monkeypatch)
    monkeypatch.setattr(matmul, "_is_native", lambda dtype: native)
    expected, hidden_gradient, weight_gradient = plain_head(dtype)
    value, hidden, weight, quiet = head_case(ALONE, dtype, pieces)
    assert value == pytest.approx(expected, abs=tolerance) and quiet == value
    torch.testing.assert_close(hidden.float(), hidden_gradient, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(weight.float(), weight_gradient, atol=tolerance, rtol=tolerance)


def test_small_probabilities_have_gradients_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss scale keeps them: a probability of 3e-5 among 1024 tokens was zero before it was
    scaled.
    """
    monkeypatch.setattr(matmul, "_is_native", lambda dtype: True)
    tokens, words, scale = 1024, 32768, 4096.0
    embedding = VocabularyParallelEmbedding(words, 4, 1.0, ALONE).to(torch.float16)
    torch.nn.init.zeros_(embedding.weight)
    hidden = torch.ones(1, tokens, 4, dtype=torch.float16).requires_grad_()
    head = LanguageModelHead(ALONE)
    value = head.loss(head.attach(embedding, hidden), torch.zeros(1, tokens, dtype=torch.long))
    (scale * value).backward()
    assert embedding.weight.grad is not None
    torch.testing.assert_close(
        embedding.weight.grad[1:].float(),
        torch.full((words - 1, 4), scale / words),
        atol=0,
        rtol=2e-3,
    )


def test_loss_scales_beyond_fp16_are_multiplied_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^16 is infinite in fp16, the gradient that it scales is not; nor is a sum over tokens that
    all agree.
    """
    monkeypatch.setattr(matmul, "_is_native", lambda dtype: True)
    embedding = VocabularyParallelEmbedding(4, 2, 1.0, ALONE).to(torch.float16)
    torch.nn.init.zeros_(embedding.weight)
    hidden = torch.full((1, 4096, 2), 32.0, dtype=torch.float16).requires_grad_()
    head = LanguageModelHead(ALONE)
    value = head.loss(head.attach(embedding, hidden), torch.zeros(1, 4096, dtype=torch.long))
    (value * torch.tensor(2.0**16) * 2.0**-8).backward()
    assert embedding.weight.grad is not None
    torch.testing.assert_close(
        embedding.weight.grad[0].float(), torch.full((2,), -0.75 * 32 * 256), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize(("pieces", "way"), [(1, "in-cache"), (3, "fused"), (3, "at-once")])
def test_loss_over_tensor_ranks(pieces: int, way: str) -> None:
    expected, hidden_gradient, weight_gradient = plain_head(torch.float32)
    ranks = run_ranks(head_on_ranks, 2, torch.float32, pieces, way)
    for value, hidden, _, quiet in ranks:
        assert value == ranks[0][0] and quiet == value
        assert value == pytest.approx(expected, abs=2e-6)
        torch.testing.assert_close(hidden, hidden_gradient, atol=2e-6, rtol=2e-6)
    joined = torch.cat([weight for _, _, weight, _ in ranks])
    torch.testing.assert_close(joined, weight_gradient, atol=2e-6, rtol=2e-6)


def test_loss_without_attach_is_refused() -> None:
    with pytest.raises(RuntimeError, match="attach"):
        LanguageModelHead(ALONE).loss(torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.long))


# ---------------------------------------------------------------------- against transformers' BLOOM
NAMES = {
    "transformer.word_embeddings.": "embedding.word.",
    "transformer.word_embeddings_layernorm.": "embedding.norm.",
    "transformer.ln_f.": "final_norm.",
    "transformer.h.": "blocks.",
    ".input_layernorm.": ".input_norm.",
    ".self_attention.": ".attention.",
    ".post_attention_layernorm.": ".post_attention_norm.",
    ".dense_h_to_4h.": ".up.",
    ".dense_4h_to_h.": ".down.",
}
STEPS, SIZE, CLIP = 12, 8, 0.3


def bloom_card(pipeline: int, tensor: int, dtype: str = "fp32") -> TrainerConfig:
    """Six heads: not a power of two, three for each of two tensor ranks."""
    return tiny(
        pipeline, tensor, dtype, CLIP, hidden_size=48, attention_heads=6, sequence_length=24
    )


def bloom() -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(11)
    shape = BloomConfig(
        vocab_size=64,
        hidden_size=48,
        n_layer=2,
        n_head=6,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        initializer_range=0.08,
    )
    model = BloomForCausalLM(shape)
    with torch.no_grad():  # biases and norms away from their trivial start
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def logical(model: Any) -> Logical:
    tensors: Logical = {}
    for theirs, parameter in model.named_parameters():
        name = theirs
        for old, new in NAMES.items():
            name = name.replace(old, new)
        value = parameter.detach().clone()
        zeros = torch.zeros_like(value)
        tensors[name] = {"weight": value, "fp32": value, "exp_avg": zeros, "exp_avg_sq": zeros}
    return tensors


def bloom_curve(config: TrainerConfig) -> tuple[list[float], list[float], list[float]]:
    """By transformers: losses, gradient norms and, to see the logits, losses of single samples
    before training.
    """
    model = bloom()
    groups = [
        [item for item in model.parameters() if item.dim() > 1],
        [item for item in model.parameters() if item.dim() == 1],
    ]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
        lr=1e-3,
        foreach=True,
    )

    def value(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    with torch.no_grad():
        singles = [value(sample.unsqueeze(0)).item() for sample in samples(config, 0, SIZE)]
    losses, norms = [], []
    for step in range(STEPS):
        result = value(samples(config, step, SIZE))
        optimizer.zero_grad()
        result.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(result.item())
    return losses, norms, singles


def our_curve(
    config: TrainerConfig, tensors: Logical
) -> tuple[list[float], list[float], list[float]]:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    fill(engine, tensors, 0)
    engine.set_learning_rate(1e-3)
    singles = []
    for sample in samples(config, 0, SIZE):
        pair = sample[:-1].unsqueeze(0), sample[1:].unsqueeze(0)
        singles.append(engine.measure(iter([pair]), 1).loss)
        engine._pipeline.reset_activation_shape()
    losses, norms = [], []
    for step in range(STEPS):
        result = engine.train_step(batches(config, mesh, step, SIZE), SIZE)
        losses.append(result.loss)
        assert result.grad_norm is not None
        norms.append(result.grad_norm)
    engine.close()
    return losses, norms, singles


@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 1), (1, 2), (2, 2)])
def test_training_equals_transformers_bloom(pipeline: int, tensor: int) -> None:
    """Same weights, same batches: logits (through per-sample losses), gradient norms and 12 AdamW
    steps.
    """
    config = bloom_card(pipeline, tensor)
    losses, norms, singles = bloom_curve(config)
    assert min(norms) > CLIP and losses[-1] < losses[0]
    for ours in run_ranks(our_curve, pipeline * tensor, config, logical(bloom())):
        torch.testing.assert_close(ours[2], singles, atol=2e-6, rtol=0)
        torch.testing.assert_close(ours[0], losses, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours[1], norms, atol=0, rtol=1e-4)


def our_logits(config: TrainerConfig, tensors: Logical, tokens: Tensor) -> Tensor:
    """Logits of one process: the stage's layers in order, then the tied projection."""
    engine = Engine.build(config, Mesh.create(config.parallel, CPU))
    fill(engine, tensors, 0)
    module = engine._pipeline.module.eval()
    with torch.no_grad():
        answer = module(tokens) @ module.tied_modules["embedding"].weight.t()
    engine.close()
    return answer


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 6e-2)])
def test_logits_equal_transformers_bloom(dtype: str, tolerance: float) -> None:
    """fp32 to rounding. bf16: 2 blocks of about 10 roundings of 2^-9 each, on logits of size 3, in
    quadrature.
    """
    config = bloom_card(1, 1, dtype)
    tokens = samples(config, 5, 3)[:, :-1]
    model = bloom()
    with torch.no_grad():
        expected = model(tokens).logits
    (ours,) = run_ranks(our_logits, 1, config, logical(model), tokens)
    assert expected.abs().max() > 1.0
    torch.testing.assert_close(ours.float(), expected, atol=tolerance, rtol=0)


# ----------------------------------------------------------------------------- z-loss
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("z", [1e-4, 1e-2])
def test_a_z_loss_is_the_plain_formula(
    pieces: int, z: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, its parts, and all gradients, where one label does not count and one is all but
    certain.
    """
    words, size, tokens = 11, 6, 6
    monkeypatch.setitem(loss.PIECE_ELEMENTS, "cpu", words * (tokens // pieces))
    torch.manual_seed(2)
    embedding = VocabularyParallelEmbedding(words, size, 1.0, ALONE)
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(words, size))
    hidden = torch.randn(1, tokens, size, requires_grad=True)
    with torch.no_grad():
        hidden[0, 5] = 9.0 * embedding.weight[7]
    labels = torch.tensor([[3, -100, 0, 10, 7, 7]])
    head = LanguageModelHead(ALONE, z)
    found = head.loss(head.attach(embedding, hidden), labels)
    logits = hidden @ embedding.weight.t()
    plain = functional.cross_entropy(logits[0], labels[0], ignore_index=-100)
    added = z * logits.logsumexp(-1)[labels >= 0].square().mean()
    torch.testing.assert_close(found, plain + added)
    torch.testing.assert_close(head.measured["lm"], plain.detach())
    torch.testing.assert_close(head.measured["z"], added.detach())
    inputs = (hidden, embedding.weight)
    right = torch.autograd.grad(plain + added, inputs)
    for mine, wanted in zip(torch.autograd.grad(found, inputs), right, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        quiet = head.loss(head.attach(embedding, hidden), labels)
    torch.testing.assert_close(quiet, found.detach())

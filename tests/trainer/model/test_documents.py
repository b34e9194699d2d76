"""Several documents in a sample: positions, attention and loss that stop at their borders, against
naive loops.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from tests.trainer.cases import CPU, batches, samples, tiny
from tests.trainer.spawn import run_ranks
from trainer.config.card import CardError, TrainerConfig
from trainer.engine import Engine
from trainer.model.documents import (
    IGNORED,
    DocumentRules,
    document_numbers,
    labels_without_ends,
    positions_in_documents,
)
from trainer.model.kernels import (
    CausalKernel,
    DenseKernel,
    FlexKernel,
    Kernel,
    build_kernel,
)
from trainer.model.positions import alibi_slopes, local_alibi_slopes
from trainer.parallel.mesh import Mesh

ALONE = Mesh.single(CPU)
END, SIZE = 3, 8
UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without")


# ---------------------------------------------------------------------------- where documents begin
@given(st.lists(st.lists(st.integers(0, 4), min_size=7, max_size=7), min_size=1, max_size=3))
def test_numbers_positions_and_labels(rows: list[list[int]]) -> None:
    tokens = torch.tensor(rows)
    documents = document_numbers(tokens, END)
    positions, labels = (
        positions_in_documents(documents),
        labels_without_ends(tokens, tokens + 1, END),
    )
    assert documents.dtype == torch.int32
    for sample, row in enumerate(rows):
        number = position = 0
        for place, token in enumerate(row):
            assert documents[sample, place] == number and positions[sample, place] == position
            assert labels[sample, place] == (IGNORED if token == END else token + 1)
            number, position = (number + 1, 0) if token == END else (number, position + 1)


# ----------------------------------------------------------------------------- kernels
def heads(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 3, 24, 16, generator=generator, dtype=dtype) for _ in range(3)]


def numbers() -> Tensor:
    tokens = torch.randint(6, (2, 24), generator=torch.Generator().manual_seed(9))
    return document_numbers(tokens, END)


def naive(
    query: Tensor, key: Tensor, value: Tensor, slopes: list[float], documents: Tensor | None
) -> Tensor:
    answer = torch.zeros_like(query)
    for sample in range(query.shape[0]):
        for head in range(query.shape[1]):
            for place in range(query.shape[2]):
                seen = [
                    other
                    for other in range(place + 1)
                    if documents is None or documents[sample, other] == documents[sample, place]
                ]
                scores = (
                    key[sample, head, seen] @ query[sample, head, place] / query.shape[3] ** 0.5
                )
                scores += slopes[head] * (torch.tensor(seen) - place)
                answer[sample, head, place] = scores.softmax(0) @ value[sample, head, seen]
    return answer


def attend(kernel: Kernel, documents: Tensor | None) -> Tensor:
    query, key, value = heads()
    return kernel(query, key, value, kernel.mask(query, query.shape[2], documents), None)


@UNFUSED
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
def test_kernels_equal_a_naive_loop(alibi: bool, inside: bool) -> None:
    documents = numbers() if inside else None
    slopes = local_alibi_slopes(3, ALONE) if alibi else None
    expected = naive(*heads(), alibi_slopes(3) if alibi else [0.0] * 3, documents)
    dense, flex = DenseKernel(slopes, inside, CPU), FlexKernel(slopes, inside, compiled=False)
    for _ in range(2):  # the second time from what was kept
        torch.testing.assert_close(attend(dense, documents), expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(attend(flex, documents), expected, atol=2e-6, rtol=1e-5)
    if not alibi and not inside:
        torch.testing.assert_close(attend(CausalKernel(), None), expected, atol=2e-6, rtol=1e-5)


@UNFUSED
def test_kernels_notice_new_documents() -> None:
    slopes, other = local_alibi_slopes(3, ALONE), numbers().flip(0).contiguous()
    expected = naive(*heads(), alibi_slopes(3), other)
    for kernel in (DenseKernel(slopes, True, CPU), FlexKernel(slopes, True, compiled=False)):
        before = attend(kernel, numbers())
        assert not torch.allclose(before, expected, atol=1e-3)
        torch.testing.assert_close(attend(kernel, other), expected, atol=2e-6, rtol=1e-5)


def test_flex_passes_over_tiles_of_other_documents() -> None:
    """Four documents of 128 tokens: of 16 tiles of 128 x 128 only the diagonal is computed."""
    documents = torch.arange(4, dtype=torch.int32).repeat_interleave(128)[None]
    tiles = FlexKernel(None, True, compiled=False).mask(torch.empty(0, device=CPU), 512, documents)
    assert isinstance(tiles, BlockMask) and tiles.sparsity() == 75.0


def test_kernels_on_this_machine() -> None:
    rules = DocumentRules(END, True, True)
    positions_only = DocumentRules(END, True, False)
    assert isinstance(build_kernel(tiny().model, ALONE, None, "fp32"), DenseKernel)
    absolute = tiny(position_embedding="absolute", require_fused_attention=True).model
    assert isinstance(build_kernel(absolute, ALONE, positions_only, "fp32"), CausalKernel)
    assert isinstance(build_kernel(absolute, ALONE, rules, "fp32"), DenseKernel)
    dropping = tiny(require_fused_attention=True, attention_dropout=0.1).model
    with pytest.raises(
        CardError, match=r"model.require_fused_attention.*no kernel serves.*on CPUs no fused kernel"
    ):
        build_kernel(dropping, ALONE, None, "fp32")


def test_one_bias_serves_all_lengths() -> None:
    """Under a curriculum one of each length would take gigabytes."""
    kernel = DenseKernel(local_alibi_slopes(3, ALONE), False, CPU)
    for length in range(8, 65, 8):
        bias = kernel.bias(length, torch.float32)
        fresh = DenseKernel(local_alibi_slopes(3, ALONE), False, CPU).bias(length, torch.float32)
        assert torch.equal(bias, fresh) and bias.shape == (1, 3, length, length)
    assert torch.equal(
        kernel.bias(16, torch.float32), kernel.bias(64, torch.float32)[..., :16, :16]
    )
    assert [made.numel() for made in kernel._made.values()] == [3 * 64 * 64]


# ----------------------------------------------------------------------------- the whole model
def marked(
    pipeline: int, tensor: int, sequence_parallel: bool = False, **settings: Any
) -> TrainerConfig:
    """The tiny card with documents that end with token END."""
    data = {key: settings.pop(key) for key in list(settings) if key.startswith(("reset_", "mask_"))}
    card = tiny(pipeline, tensor, **settings)
    return card.model_copy(
        update={
            "data": card.data.model_copy(update={"end_of_document_id": END} | data),
            "parallel": card.parallel.model_copy(update={"sequence_parallel": sequence_parallel}),
        }
    )


def with_ends(config: TrainerConfig, step: int) -> Tensor:
    """Samples in which every row has a document end at its 6th and 11th token, and one at its very
    last input.
    """
    tokens = samples(config, step, SIZE)
    tokens[tokens == END] = END + 1
    tokens[:, [5, 10, 15]] = END
    return tokens


def train(config: TrainerConfig, steps: int) -> tuple[list[float], list[str]]:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    losses = []
    for step in range(steps):
        rows = with_ends(config, step).split(config.batch.micro_batch_size)
        losses.append(
            engine.train_step(iter([(row[:, :-1], row[:, 1:]) for row in rows]), SIZE, step).loss
        )
    differing = engine.disagreeing_parameters()
    engine.close()
    return losses, differing


ALL = {"reset_position_ids": True, "reset_attention_mask": True, "mask_end_of_document_loss": True}


@pytest.mark.parametrize("positions", ["alibi", "absolute", "rotary"])
def test_every_cut_of_the_model_gives_the_same_losses(positions: str) -> None:
    """Of the first step, and of the second, which has seen gradients."""
    ((reference, _),) = run_ranks(train, 1, marked(1, 1, position_embedding=positions, **ALL), 2)
    ((unmarked, _),) = run_ranks(train, 1, marked(1, 1, position_embedding=positions), 2)
    assert abs(reference[0] - unmarked[0]) > 1e-4  # the keys do something
    recomputed = {"activation_checkpointing": True, "position_embedding": positions}
    cards = [
        marked(2, 2, True, **recomputed, **ALL),
        marked(2, 2, partition_activations=True, **recomputed, **ALL),
    ]
    for card in cards:
        for losses, differing in run_ranks(train, 4, card, 2):
            torch.testing.assert_close(losses, reference, atol=2e-6, rtol=0)
            assert differing == []


def apart(config: TrainerConfig, whole: bool) -> float:
    """The loss of one sample of three documents: as it is, or as the mean over its documents, each
    trained alone.
    """
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    row = with_ends(config, 0)[:1]
    module = engine._pipeline.module.eval()
    parts = [slice(0, 16)] if whole else [slice(0, 6), slice(6, 11), slice(11, 16)]
    total = 0.0
    with torch.no_grad():
        for part in parts:
            inputs = row[:, :-1][:, part]
            logits = module(inputs)[0] @ module.tied_modules["embedding"].weight.t()
            losses = functional.cross_entropy(logits, row[0, 1:][part], reduction="none")
            total += losses[inputs[0] != END].sum().item() / 13  # 16 tokens, 3 of them ends
    if whole:
        pair = row[:, :-1], row[:, 1:]
        total = engine.measure(iter([pair]), 1).loss
    engine.close()
    return total


@pytest.mark.parametrize("positions", ["alibi", "absolute", "rotary"])
def test_documents_in_one_sample_are_as_good_as_alone(positions: str) -> None:
    options = {"position_embedding": positions, "init_std": 0.3}
    (together,) = run_ranks(apart, 1, marked(1, 1, **options, **ALL), True)
    (separate,) = run_ranks(apart, 1, marked(1, 1, **options), False)
    (unmarked,) = run_ranks(apart, 1, marked(1, 1, **options, mask_end_of_document_loss=True), True)
    assert together == pytest.approx(separate, abs=2e-6)
    assert abs(unmarked - together) > 1e-3


def nothing_counts(config: TrainerConfig) -> list[tuple[float, float | None]]:
    """A step in which one micro batch, then every one, has no label that counts."""
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    answers = []
    for empty in (1, SIZE // 2):
        pairs = list(batches(config, mesh, 0, SIZE))
        pairs = [
            (tokens, labels * 0 + IGNORED) if i < empty else (tokens, labels)
            for i, (tokens, labels) in enumerate(pairs)
        ]
        result = engine.train_step(iter(pairs), SIZE)
        answers.append((result.loss, result.grad_norm))
    engine.close()
    return answers


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_micro_batch_without_labels_counts_nothing(tensor: int) -> None:
    for (some, some_norm), (none, none_norm) in run_ranks(nothing_counts, tensor, tiny(1, tensor)):
        # 3 of 4 micro batches
        assert 0.7 * 4.1 < some < 0.78 * 4.3 and some_norm is not None and some_norm > 0.01
        assert none == 0.0 and none_norm == 0.0

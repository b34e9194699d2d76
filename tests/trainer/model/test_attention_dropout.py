"""Dropout in flex attention: against plain attention under the same mask, which is computed here by
other means.

On a CPU flex attention is plain arithmetic by the formulas of its GPU kernels, gradients too, which
torch offers on GPUs alone: so the refusal is taken away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainer.cases import tiny
from trainer.model import kernels
from trainer.model.attention import BlockSetup, SelfAttention
from trainer.model.kernels import BACKENDS, DenseKernel, FlexKernel, PaddedKernel
from trainer.model.positions import alibi_slopes
from trainer.model.random import Drop, is_kept, least_kept, row_words
from trainer.parallel.mesh import Mesh

CPU = torch.device("cpu")
BATCH, HEADS, LENGTH, SIZE = 2, 4, 40, 16
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


@pytest.fixture(autouse=True)
def gradients_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch.manual_seed(1)
    yield


# ----------------------------------------------------------------------------- the mask, by numpy
def lowbias32(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    return bits ^ (bits >> np.uint32(16))


def plain_mask(words: Tensor, heads: range, dropout: float, length: int = LENGTH) -> Tensor:
    """The definition, in unsigned numbers: True where a weight stays, [batch, heads, length,
    length].
    """
    first, second = (part.numpy().view(np.uint32)[:, None, None, None] for part in words.unbind(1))
    rows = [np.asarray(heads), np.arange(length), np.arange(length)]
    grid = np.meshgrid(*(row.astype(np.uint32) for row in rows), indexing="ij", sparse=True)
    head, query, key = grid
    row = lowbias32(lowbias32(first ^ head) ^ query)
    other = lowbias32(lowbias32(second ^ query) ^ head)
    bits = row ^ (key * np.uint32(0x9E3779B1))
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D) + other
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    signed = np.ascontiguousarray(bits).view(np.int32).astype(np.int64)
    return torch.from_numpy(signed >= round(dropout * 2**32) - 2**31)


def drawn_words(samples: int = BATCH) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (samples, 2), dtype=torch.int32)


def drawn_mask(words: Tensor, dropout: float, heads: int = HEADS, length: int = LENGTH) -> Tensor:
    """As flex attention asks for each weight; and as whole rows are dropped, which is the same."""
    head, query, key = torch.meshgrid(
        *(torch.arange(n) for n in (heads, length, length)), indexing="ij"
    )
    row = row_words(words[:, None, None, None].unbind(4), head, query)
    found = is_kept(row, key, least_kept(dropout))
    rows = Drop(dropout, words).dropped(torch.ones(found.shape))
    assert torch.equal(found, rows != 0)
    return found


def test_the_mask_is_the_definition_in_unsigned_numbers() -> None:
    for number in range(20):
        words, dropout = drawn_words(), (0.1, 0.5, 0.9)[number % 3]
        assert torch.equal(drawn_mask(words, dropout), plain_mask(words, range(HEADS), dropout))


@pytest.mark.parametrize("dropout", [0.01, 0.1, 0.5])
def test_as_many_are_dropped_as_the_card_says_and_no_two_of_them_together(dropout: float) -> None:
    """In each row and column, head, sample and draw; neighbours in each direction, and draws that
    differ by one bit.
    """
    heads, length = 4, 128
    words = torch.tensor(
        [
            [[5, 7], [4, 7], [5, 6], [5 ^ -(2**31), 7], [7, 5]],
            [[6, 7], [5, 8], [8, 9], [1, 1], [0, 0]],
        ]
    ).int()
    masks = torch.stack([drawn_mask(each, dropout, heads, length) for each in words])
    masks = masks.double() - (1 - dropout)
    spread = math.sqrt(dropout * (1 - dropout))
    for axis in range(5):
        means = masks.mean(dim=[other for other in range(5) if other != axis])
        places = masks.numel() / masks.shape[axis]
        assert float(means.abs().max()) < 5 * spread / math.sqrt(places)
    for axis in range(5):
        for distance in (1, 2, 3, 7, 64):
            if distance >= masks.shape[axis]:
                continue
            one, other = (
                masks.narrow(axis, 0, masks.shape[axis] - distance),
                masks.roll(-distance, axis),
            )
            other = other.narrow(axis, 0, masks.shape[axis] - distance)
            assert abs(float((one * other).mean())) < 5 * spread**2 / math.sqrt(one.numel()), (
                axis,
                distance,
            )


# ----------------------------------------------------------------------------- attention under it
def plain(
    heads: list[Tensor], slopes: Tensor | None, hidden: Tensor, kept: Tensor, dropout: float
) -> Tensor:
    """Soft-max, then dropout, then the values, in fp64."""
    query, key, value = (each.double() for each in heads)
    shared = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    place = torch.arange(query.shape[2])
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * (place[None, :] - place[:, None])
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=3)
    return (weights * kept / (1 - dropout)) @ value


@pytest.mark.parametrize("dropout", [0.1, 0.9])
@pytest.mark.parametrize("case", ["alibi", "documents", "groups"])
def test_it_computes_what_plain_attention_does_under_the_same_mask(
    case: str, dropout: float
) -> None:
    """Also of the first tokens, all of whose few weights are dropped at times."""
    slopes = torch.tensor(alibi_slopes(HEADS)) if case == "alibi" else None
    documents = (
        torch.arange(LENGTH).div(15, rounding_mode="floor").expand(BATCH, LENGTH).contiguous()
    )
    kernel = FlexKernel(slopes, case == "documents", compiled=False)
    heads = [torch.randn(BATCH, HEADS, LENGTH, SIZE) for _ in "qkv"]
    if case == "groups":
        heads[1:] = [each[:, ::2].contiguous() for each in heads[1:]]
    heads = [each.requires_grad_() for each in heads]
    mask = kernel.mask(heads[0], LENGTH, documents)
    words = drawn_words()
    found = kernel(*heads, mask, Drop(dropout, words))
    kept = plain_mask(words, range(HEADS), dropout)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    if case == "documents":
        hidden = hidden | (documents[0][None, :] != documents[0][:, None])
    assert (kept & ~hidden).any(dim=3).logical_not().any(), (
        "no row without a weight: the case is not looked at"
    )
    grain = torch.randn_like(found)
    expected = plain(heads, slopes, hidden, kept, dropout)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6)
    ours, theirs = (
        torch.autograd.grad(found, heads, grain),
        torch.autograd.grad(expected, heads, grain.double()),
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("asking", [LENGTH, 24], ids=["own tokens", "a decoder's"])
def test_padded_samples_are_attended_to_as_plain_attention_does(asking: int) -> None:
    """What BERT and T5 take on a GPU; and as with the mask in memory. A sample of padding alone, in
    which nothing counts, is finite.
    """
    marks = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    marks[0, 25:] = 0
    marks[1] = 0
    flexes = PaddedKernel(flex=FlexKernel(None, False, compiled=False))
    assert kernels.drops_by_place(flexes)
    words, dropout = drawn_words(), 0.4
    heads = [
        torch.randn(BATCH, HEADS, length, SIZE, requires_grad=True)
        for length in (asking, LENGTH, LENGTH)
    ]
    grain = torch.randn(BATCH, HEADS, asking, SIZE)
    found = []
    for kernel in (flexes, PaddedKernel()):
        mixed = kernel(*heads, kernel.mask(heads[0], LENGTH, marks), Drop(dropout, words))
        found.append([mixed, *torch.autograd.grad(mixed, heads, grain)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-5)
        assert bool(one.isfinite().all())
    query, key, value = (each[0].double() for each in heads)
    kept = plain_mask(words, range(HEADS), dropout)[0, :, :asking]
    scores = (query @ key.transpose(1, 2) / math.sqrt(SIZE)).masked_fill(marks[0] == 0, -math.inf)
    expected = (scores.softmax(dim=2) * kept / (1 - dropout)) @ value
    torch.testing.assert_close(found[0][0][0].double(), expected, rtol=1e-5, atol=2e-6)


def test_its_mean_over_draws_is_attention_without_dropout() -> None:
    kernel, draws = FlexKernel(torch.tensor(alibi_slopes(HEADS)), False, compiled=False), 1000
    # each sample has a mask of its own
    heads = [torch.randn(1, HEADS, 8, SIZE).expand(draws, -1, -1, -1) for _ in "qkv"]
    mask = kernel.mask(heads[0], 8, None)
    found = kernel(*heads, mask, Drop(0.3, drawn_words(draws))).double()
    error = found.std(dim=0) / math.sqrt(draws)
    off = (found.mean(dim=0) - kernel(*heads, mask, None)[0]).abs()
    assert float((off / error).max()) < 5.0


# ----------------------------------------------------------------------------- who drops what
@pytest.mark.parametrize("kind", ["flex", "dense", "dense in strips"])
def test_tensor_ranks_have_the_mask_of_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each for its own heads; and all kernels the same."""
    slopes, words = torch.tensor(alibi_slopes(HEADS)), drawn_words()
    heads = [torch.randn(BATCH, HEADS, LENGTH, SIZE) for _ in "qkv"]
    if kind == "dense in strips":
        monkeypatch.setattr(kernels, "STRIP", 8)

    def attended(first: int, count: int, flexes: bool) -> Tensor:
        own_slopes = slopes[first : first + count]
        dense = DenseKernel(own_slopes, False, CPU, BACKENDS["math"])
        kernel = FlexKernel(own_slopes, False, compiled=False) if flexes else dense
        own = [each[:, first : first + count] for each in heads]
        return kernel(*own, kernel.mask(own[0], LENGTH, None), Drop(0.2, words, first))

    parts = torch.cat([attended(first, 2, kind == "flex") for first in (0, 2)], dim=1)
    torch.testing.assert_close(parts, attended(0, HEADS, True), rtol=1e-5, atol=2e-6)


def test_only_torchs_fused_kernels_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(hidden_size=256, attention_dropout=0.1).model
    flexes, fused = (
        FlexKernel(None, False, compiled=False),
        DenseKernel(None, False, CPU, BACKENDS["efficient"]),
    )
    for kernel, draws in ((flexes, False), (fused, True), (DenseKernel(None, False, CPU), False)):
        attention = SelfAttention(BlockSetup(model, Mesh(1, 1, 2, 0, CPU), kernel)).train()
        assert attention.draws == draws


def test_another_micro_batch_makes_no_other_code() -> None:
    made: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        made.append(graph)
        return graph.forward

    kernel = FlexKernel(torch.tensor(alibi_slopes(HEADS)), False, compiled=False)
    kernel._attend = torch.compile(kernel._attend_as_is, backend=backend, fullgraph=True)
    heads = [torch.randn(BATCH, HEADS, LENGTH, SIZE) for _ in "qkv"]
    mask = kernel.mask(heads[0], LENGTH, None)
    found = [kernel(*heads, mask, Drop(0.3, drawn_words())) for _ in range(3)]
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    assert len(made) == 1

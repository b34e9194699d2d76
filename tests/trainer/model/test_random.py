"""Dropout's masks by place: shares, chance between neighbours, and what they follow from.

Bounds are of five standard deviations, which a fair coin exceeds once in 1.7 million looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trainer.mask_words import give_words
from trainer.model.random import (
    Dropout,
    DropoutPlaces,
    dropout,
    kept_in_rows,
    least_kept,
    row_words,
)
from trainer.parallel.mesh import Mesh

CPU = torch.device("cpu")
ALONE = Mesh(1, 1, 1, 0, CPU)
SAMPLES, LENGTH, FEATURES = 4, 96, 256
PLACES = ["blocks.0.mlp_dropout", "blocks.1.mlp_dropout", "blocks.0.attention_dropout"]
KEYS = ["1/dropout/0", "1/dropout/1", "2/dropout/0"]


def words_of(keys: Iterable[str] = KEYS, places: Iterable[str] = PLACES) -> Tensor:
    """[keys, places, samples, 2]."""
    stage = [(place, Dropout(0.1, ALONE)) for place in places]
    found = []
    for key in keys:
        give_words(stage, SAMPLES, key)
        found.append(torch.stack([module.words for _, module in stage if module.words is not None]))
    return torch.stack(found)


def masks(probability: float) -> Tensor:
    """Of steps and seeds, places, samples, positions and features: True where an element stays."""
    one, other = words_of().flatten(0, 2)[:, None].unbind(2)
    row = row_words((one, other), torch.arange(LENGTH))
    kept = kept_in_rows(row, FEATURES, least_kept(probability))
    return kept.view(len(KEYS), len(PLACES), SAMPLES, LENGTH, FEATURES)


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_the_card_says(probability: float) -> None:
    """Everywhere: of each step, place, sample, position and feature."""
    off = masks(probability).double() - (1 - probability)
    spread = math.sqrt(probability * (1 - probability))
    assert abs(float(off.var()) - spread**2) < 5 * spread / math.sqrt(off.numel())
    for axis in range(5):
        means = off.mean(dim=[other for other in range(5) if other != axis])
        count = off.numel() / off.shape[axis]
        assert float(means.abs().max()) < 5 * spread / math.sqrt(count), axis


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_no_two_elements_are_dropped_together_more_often_than_by_chance(probability: float) -> None:
    """Neighbours and others along each axis: steps, layers, samples, rows, columns."""
    off = masks(probability).double() - (1 - probability)
    variance = probability * (1 - probability)
    for axis in range(5):
        for distance in {1, 2, 3, 7, 64, 128} & set(range(off.shape[axis])):
            count = off.shape[axis] - distance
            one, other = off.narrow(axis, 0, count), off.narrow(axis, distance, count)
            together = abs(float((one * other).mean()))
            assert together < 5 * variance / math.sqrt(one.numel()), (axis, distance)


@pytest.mark.parametrize("axis", [3, 4])
def test_runs_of_eight_are_as_often_as_chance_has_them(axis: int) -> None:
    """Chi-square over all 256 patterns of eight neighbours, of a fair coin."""
    fair = masks(0.5).movedim(axis, -1).reshape(-1, 8)
    patterns = (fair.int() * 2 ** torch.arange(8)).sum(dim=1).numpy()
    counts = np.bincount(patterns, minlength=256)
    expected = counts.sum() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def test_bytes_of_the_words_are_spread_evenly() -> None:
    """Of many steps and places: chi-square over the 256 values of each byte."""
    words = words_of((f"7/dropout/{step}" for step in range(400)), PLACES)
    counts = np.bincount(words.contiguous().view(torch.uint8).flatten().numpy(), minlength=256)
    expected = counts.sum() / 256
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 5 * math.sqrt(510)


# ----------------------------------------------------------------------------- what it follows from
def test_samples_have_their_masks_however_they_are_dealt() -> None:
    """Two replicas with micro batches of two against one with one of eight."""
    place = Dropout(0.1, ALONE)
    places = DropoutPlaces(ALONE)
    places.locate([("a", place)])
    places.begin("1/dropout/0", torch.arange(8).view(1, 8))
    whole, found = place.words, []
    assert whole is not None
    for numbers in ([[0, 1], [4, 5]], [[2, 3], [6, 7]]):
        places.begin("1/dropout/0", torch.tensor(numbers))
        for number in (0, 1):
            places.next_of(0)
            assert places.number == number and place.words is not None
            found.append(place.words)
    assert torch.equal(torch.cat([found[0], found[2], found[1], found[3]]), whole)


def test_a_recomputation_has_its_micro_batch_again_and_parts_have_their_own() -> None:
    place, places = Dropout(0.1, ALONE), DropoutPlaces(ALONE)
    places.locate([("a", place), ("b", Dropout(0.0, ALONE))])
    places.begin("1/dropout/0", torch.arange(4).view(2, 2))
    found = []
    for part in (0, 0, 1):
        places.next_of(part)
        assert place.words is not None
        found.append(place.words)
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    places.enter(1)
    assert place.words is not None and torch.equal(place.words, found[1])


def test_generators_are_seeded_alike_again_and_apart_on_other_ranks() -> None:
    """For kernels that drop by themselves."""

    def drawn(rank: int, number: int, key: str = "1/dropout/0") -> float:
        mesh = Mesh(1, 1, 2, rank, CPU)
        place, places = Dropout(0.1, mesh), DropoutPlaces(mesh)
        places.locate([("a", place)])
        places.begin(key, torch.arange(4).view(2, 2))
        places.enter(number)
        place.seed_generators()
        return float(torch.rand(()))

    cases = [(0, 0), (1, 0), (0, 1), (0, 0, "1/dropout/1")]
    found = [drawn(*case) for case in cases]
    assert found == [drawn(*case) for case in cases] and len(set(found)) == len(cases)


def test_pieces_are_the_whole_and_gradients_have_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of()[0, 0]
    hidden = torch.randn(SAMPLES, LENGTH, FEATURES, requires_grad=True)
    whole = dropout(hidden, words, 0.25, 0)
    monkeypatch.setattr("trainer.model.random.WIDENED_ELEMENTS", 1000)
    assert torch.equal(dropout(hidden, words, 0.25, 0), whole)
    (gradient,) = torch.autograd.grad(whole.sum(), hidden)
    assert torch.equal(gradient, (whole != 0) / 0.75)
    torch.testing.assert_close(whole, hidden * gradient)


def test_nothing_is_dropped_where_nothing_is_trained() -> None:
    layer = Dropout(0.5, ALONE)
    hidden = torch.ones(SAMPLES, 2, 3)
    assert layer.eval()(hidden) is hidden
    with pytest.raises(AssertionError, match="a step has begun"):
        layer.train()(hidden)
    stage: list[tuple[str, nn.Module]] = [("a", layer)]
    give_words(stage, SAMPLES)
    assert set(layer(hidden).flatten().tolist()) == {0.0, 2.0}


def test_compiled_it_has_the_same_mask_in_one_graph_for_all_other_lengths() -> None:
    made: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        made.append(graph)
        found: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return found

    compiled, words = torch.compile(dropout, backend=backend, fullgraph=True), words_of()[0, 0]
    for length in (8, 16, 24):
        hidden = torch.randn(SAMPLES, length, 6, requires_grad=True)
        one, other = compiled(hidden, words, 0.1, 1), dropout(hidden, words, 0.1, 1)
        gradients = (torch.autograd.grad(each.sum(), hidden)[0] for each in (one, other))
        assert torch.equal(one, other) and torch.equal(*gradients)
    assert len(made) == 2

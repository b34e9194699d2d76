"""Tensors of two states: what NumPy finds in the whole tensors, the diff finds in whatever pieces
they lie.
"""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.debug.made import SHAPES, dumped, found, nobody, saved, whole
from trainer.debug import compare
from trainer.debug.compare import model_order, violations

GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)]
NAMES = sorted(SHAPES)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(GRIDS),
    st.sampled_from(GRIDS),
    st.sampled_from(NAMES),
    st.integers(0, 99),
    st.booleans(),
)
def test_the_largest_difference_is_that_of_the_whole_tensors(
    one: tuple[int, int, int], other: tuple[int, int, int], name: str, seed: int, checkpoint: bool
) -> None:
    a, b = whole(), whole()
    generator = torch.Generator().manual_seed(seed)
    change = torch.where(torch.rand(b[name].shape, generator=generator) < 0.3, 0.5, 0.0)
    b[name] += change * torch.rand(b[name].shape, generator=generator)
    gaps = numpy.abs(a[name].numpy() - b[name].numpy())
    left = saved(a) if checkpoint else dumped(a, one)
    items = found(left, dumped(b, other, label="B"))
    if not gaps.any():
        assert items == []
        return
    assert {item.name for item in items} == {name}
    deltas = [item.delta for item in items if item.delta is not None]
    worst = max(deltas, key=lambda delta: delta.largest)
    assert worst.largest == gaps.max() and worst.at is not None
    assert gaps[worst.at] == gaps.max()
    assert (worst.a, worst.b) == (a[name][worst.at].item(), b[name][worst.at].item())
    once = {
        item.place.tensor: item for item in items if item.place is not None and item.place.data == 0
    }
    cut = SHAPES[name][1] is not None
    counts = [item.delta.different or 0 for item in once.values() if item.delta is not None]
    assert (sum(counts) if cut else max(counts)) == numpy.count_nonzero(gaps)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(GRIDS), st.sampled_from(GRIDS), st.sampled_from(NAMES))
def test_fingerprints_see_one_changed_number_on_any_two_grids(
    one: tuple[int, int, int], other: tuple[int, int, int], name: str
) -> None:
    a, b = whole(), whole()
    b[name].view(-1)[-1] += 2.0**-20
    assert found(dumped(a, one, full=False), dumped(a, other, full=False, label="B")) == []
    items = found(dumped(a, one, full=False), dumped(b, other, full=False, label="B"))
    assert {item.name for item in items} == {name}
    assert {item.delta.different for item in items if item.delta} == {None}


@pytest.mark.parametrize("full", [True, False])
def test_the_tolerance_is_relative_to_the_largest_value_of_a(full: bool) -> None:
    a, b = whole(), whole()
    name = "final_norm.bias"
    a[name] = torch.tensor([100.0, 1.0, 2.0, 3.0])
    b[name] = torch.tensor([100.0, 1.5, 2.0, 3.0])
    left, right = dumped(a, (1, 1, 1), full=full), dumped(b, (1, 1, 1), full=full)
    assert [item.name for item in found(left, right, 0.004)] == [name]
    assert found(left, right, 0.006) == []
    assert [item.name for item in found(left, right)] == [name]


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [
        (math.nan, math.nan, None), (math.inf, math.inf, None), (0.0, -0.0, None),
        (math.nan, 1.0, math.inf), (1.0, math.nan, math.inf), (math.inf, -math.inf, math.inf), (1.0, 1.5, 0.5),
    ],
)  # fmt: skip
def test_numbers_that_are_not_finite(a: float, b: float, largest: float | None) -> None:
    one, other = whole(), whole()
    one["final_norm.bias"][2], other["final_norm.bias"][2] = a, b
    items = found(dumped(one, (1, 1, 1)), dumped(other, (1, 1, 1)), tolerance=0.0)
    assert [item.delta and item.delta.largest for item in items] == (
        [] if largest is None else [largest]
    )
    if largest is not None:
        assert items[0].delta is not None and items[0].delta.at == (2,)
    if largest == math.inf:
        assert found(dumped(one, (1, 1, 1)), dumped(other, (1, 1, 1)), tolerance=1e6) != []


@pytest.mark.parametrize("a", [math.nan, math.inf])
def test_fingerprints_with_numbers_that_are_not_finite(a: float) -> None:
    one, same, other = whole(), whole(), whole()
    for tensors in (one, same):
        tensors["final_norm.bias"][2] = a
    left = dumped(one, full=False)
    assert found(left, dumped(same, full=False, label="B")) == []
    assert found(left, dumped(other, full=False, label="B"), tolerance=1.0) != []


def test_dtypes_may_differ_when_the_numbers_are_the_same() -> None:
    narrow = whole(dtype=torch.bfloat16)
    wide = {name: value.float() for name, value in narrow.items()}
    assert found(saved(narrow), saved(wide)) == []
    assert found(dumped(narrow, full=True), saved(wide)) == []
    assert {item.name for item in found(saved(narrow), saved(whole()))} == set(SHAPES)


def test_tensors_of_one_side_alone_and_other_shapes() -> None:
    a, b = whole(), whole()
    del b["final_norm.bias"]
    b["blocks.0.mlp.down.weight"] = torch.zeros(4, 8)
    for left, right in ((saved(a), saved(b)), (dumped(a), dumped(b)), (saved(a), dumped(b))):
        items = {item.name: item for item in found(left, right)}
        assert items.keys() == {"final_norm.bias", "blocks.0.mlp.down.weight"}
        assert items["final_norm.bias"].only == "a"
        assert {item.only for item in found(right, left)} == {"b", None}
        delta = items["blocks.0.mlp.down.weight"].delta
        assert delta is not None and math.isnan(delta.largest)


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = whole(), whole()
    b["embedding.word.weight"][5, 3] += 1.0
    b["embedding.word.weight"][1, 0] += 0.5
    expected = found(saved(a), saved(b))
    monkeypatch.setattr(compare, "PIECE_ELEMENTS", 5)
    assert found(saved(a), saved(b)) == expected
    assert (
        expected[0].delta is not None
        and expected[0].delta.at == (5, 3)
        and expected[0].delta.different == 2
    )


def spoilt(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1.0


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    ("name", "rank", "axes"),
    [
        # ranks of the grid 2 x 2 x 2 are (stage, data, tensor)
        ("embedding.word.weight", 6, {("stage", 6), ("data", 6)}),
        ("blocks.0.input_norm.weight", 1, {("tensor", 1), ("data", 3)}),
        ("blocks.0.mlp.down.weight", 3, {("data", 3)}),
    ],
)
def test_copies_inside_one_state(
    name: str, rank: int, axes: set[tuple[str, int]], full: bool
) -> None:
    assert violations(dumped(whole(), full=full), nobody) == []
    broken = violations(dumped(whole(), spoil={(name, rank): spoilt}, full=full), nobody)
    assert {(item.axis, item.place.rank) for item in broken} == axes
    assert {item.name for item in broken} == {name}


def test_the_order_is_that_of_the_model() -> None:
    names = [
        "embedding.word.weight", "embedding.position.weight", "embedding.norm.weight", "embedding.norm.bias",
        "blocks.0.input_norm.weight", "blocks.0.attention.query_key_value.weight", "blocks.0.attention.dense.bias",
        "blocks.0.post_attention_norm.weight", "blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias",
        "blocks.0.mlp.down.weight", "blocks.2.input_norm.weight", "blocks.10.input_norm.weight", "final_norm.weight",
        "pooler.weight",
    ]  # fmt: skip
    assert sorted(sorted(names), key=model_order) == names

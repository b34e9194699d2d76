"""What kind of fault a difference is, and which states are compared with which."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tests.trainer.debug.made import SHAPES, dumped, found, kinds, nobody, saved, verdict, whole
from trainer.debug import compare
from trainer.debug.compare import model_order, violations
from trainer.debug.diff_command import pair_up
from trainer.debug.record import Moment
from trainer.debug.report import describe, document
from trainer.debug.snapshot import StateSnapshot

COUNTERS = {
    "optimizer_step": 5,
    "learning_rate": 1e-4,
    "consumed_samples": 80,
    "consumed_tokens": 1280,
}


def pair(**facts: Any) -> tuple[StateSnapshot, StateSnapshot]:
    return dumped(whole(), facts=COUNTERS), dumped(whole(), facts=COUNTERS | facts, label="B")


def test_equal_states() -> None:
    result = verdict(*([state] for state in pair()))
    assert result.findings == () and result.numbers >= 2 * sum(
        tensor.numel() for tensor in whole().values()
    )
    assert document(result)["equal"] is True


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("optimizer_step", 0, "optimizer-step"),
        ("learning_rate", 2e-4, "schedule"),
        ("consumed_samples", 96, "data-order"),
        ("consumed_tokens", 1281, "data-order"),
        ("samples_digest", 5, "data-order"),
        ("skipped", 3, "counters"),
        ("loss_scale", 1024.0, "schedule"),
    ],
)
def test_facts_after_the_same_steps(name: str, value: Any, kind: str) -> None:
    before = {"samples_digest": 4, "skipped": 2, "loss_scale": 2048.0}
    a = dumped(whole(), facts=COUNTERS | before)
    b = dumped(whole(), facts=COUNTERS | before | {name: value}, label="B")
    result = verdict([a], [b])
    assert kinds(result.findings) == [kind] and result.findings[0].names == (name,)
    assert all(finding.delta is None for finding in result.findings)


@pytest.mark.parametrize(
    ("step", "samples", "expected"),
    [
        (15, 160, []),
        (13, 160, []),  # two updates were skipped
        (5, 160, ["weight"]),
        (3, 160, ["optimizer-step", "weight"]),
        (16, 160, ["optimizer-step", "weight"]),
        (15, 80, ["data-order", "weight"]),
        (15, 60, ["data-order", "weight"]),
    ],
)
def test_counters_move_on_with_the_steps_between(
    step: int, samples: int, expected: list[str]
) -> None:
    facts = {"optimizer_step": step, "consumed_samples": samples, "consumed_tokens": samples * 16}
    a = saved(whole(), facts=COUNTERS)
    b = saved(
        whole(1) if "weight" in expected else whole(),
        facts=COUNTERS | facts,
        completed=15,
        label="B",
    )
    forward, backward = verdict([a], [b]), verdict([b], [a])
    assert kinds(forward.findings) == expected == kinds(backward.findings)
    assert [line[:20] for line in (*forward.remarks, *backward.remarks)] == [
        "10 steps lie between"
    ] * 2


def test_random_state_is_compared_on_one_shape_only() -> None:
    a = dumped(whole())
    b = replace(
        dumped(whole(), label="B"),
        random_state={rank: {"torch": "1" if rank == 3 else "0"} for rank in range(8)},
    )
    [finding] = verdict([a], [b]).findings
    assert finding.kind == "random-state" and "rank 3" in finding.detail[0]
    other = replace(dumped(whole(), (2, 1, 2), label="B"), random_state={0: {"torch": "1"}})
    result = verdict([a], [other])
    assert result.findings == () and "different shapes" in result.remarks[0]


def add(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 0.5


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        ({("embedding.word.weight", 4): add, ("embedding.word.weight", 6): add}, "tied-copy"),
        (
            {("blocks.0.input_norm.weight", 1): add, ("blocks.0.input_norm.weight", 3): add},
            "tensor-duplicate",
        ),
        ({("blocks.0.mlp.down.weight", 3): add}, "data-replica"),
        ({("blocks.0.mlp.down.weight", 1): add, ("blocks.0.mlp.down.weight", 3): add}, "weight"),
    ],
)
@pytest.mark.parametrize("full", [True, False])
def test_a_copy_that_drifted_on_either_side(spoil: dict[Any, Any], kind: str, full: bool) -> None:
    sound, broken = dumped(whole(), full=full), dumped(whole(), spoil=spoil, full=full, label="B")
    result = verdict([sound], [broken])
    assert kinds(result.findings) == [kind]
    [(name, _), *_] = spoil
    assert result.findings[0].names == (name,)
    assert {place.rank for place in result.findings[0].places} == {rank for _, rank in spoil}
    assert kinds(verdict([replace(broken, label="A")], [replace(sound, label="B")]).findings) == [
        kind
    ]
    if kind != "weight":  # equal to each other, and both corrupt
        both = verdict([broken], [replace(broken, label="C")])
        assert kinds(both.findings) == [kind] and len(both.findings[0].between) == 1


def test_moments_and_masters() -> None:
    moments = {"exp_avg": whole(1), "exp_avg_sq": whole(2), "fp32": whole()}
    a = saved(whole(), moments)  # type: ignore[arg-type]
    changed = {kind: {**held} for kind, held in moments.items()}
    changed["exp_avg"]["blocks.0.mlp.down.weight"] = (
        moments["exp_avg"]["blocks.0.mlp.down.weight"] * 1.001
    )
    [finding] = verdict([a], [saved(whole(), changed, label="B")]).findings  # type: ignore[arg-type]
    assert (finding.kind, finding.names) == ("moment", ("blocks.0.mlp.down.weight/exp_avg",))
    changed["fp32"]["final_norm.bias"] = whole()["final_norm.bias"] + 1e-6
    result = verdict([a], [saved(whole(), changed, label="B")])  # type: ignore[arg-type]
    assert kinds(result.findings) == ["master-weight", "moment"]
    weights_only = verdict([a], [saved(whole(), label="B")])
    assert weights_only.findings == () and "without its optimizer" in weights_only.remarks[0]


def test_another_model_is_named() -> None:
    a, b = (
        saved(whole(), model={"model.layers": 2}),
        saved(whole(), model={"model.layers": 3}, label="B"),
    )
    [finding] = verdict([a], [b]).findings
    assert finding.kind == "model" and finding.detail == ("model.layers is 2 in A and 3 in B",)


def test_a_rank_without_a_dump_is_not_called_equal() -> None:
    result = verdict([dumped(whole())], [dumped(whole(), missing=(3, 5), label="B")])
    assert kinds(result.findings) == ["model", "missing"]
    assert any("ranks 3, 5" in line for finding in result.findings for line in finding.detail)


def test_ranks_that_disagree_on_a_counter() -> None:
    a = dumped(whole(), facts=COUNTERS)
    b = dumped(whole(), facts=COUNTERS, label="B")
    facts = {
        rank: {**known, "optimizer_step": 4 if rank == 6 else 5} for rank, known in b.facts.items()
    }
    [finding] = verdict([a], [replace(b, facts=facts)]).findings
    assert finding.kind == "optimizer-step" and finding.detail == (
        "the ranks disagree on optimizer_step: 5 on ranks 0, 1, 2, 3 and 3 more; 4 on rank 6",
    )


# ----------------------------------------------------------------------------- which with which
def at(label: str, moment: Moment, completed: int) -> StateSnapshot:
    return dumped(whole(), (1, 1, 1), label=label, moment=moment, completed=completed)


def test_a_restart_is_compared_across_the_save() -> None:
    """As by hand: after iteration 805 in the first folder against before iteration 806 in the
    second.
    """
    a = [at("A", "before-iteration", 804), at("A", "after-iteration", 805)]
    b = [at("B", "before-iteration", 805), at("B", "after-iteration", 806)]
    titles = [(one.title, other.title) for one, other in pair_up(a, b)]
    assert titles == [("A (after-iteration 805)", "B (before-iteration 806)")]


def test_everything_between_two_steps_must_be_equal() -> None:
    a = [
        at("A", "after-iteration", 5),
        at("A", "on-save", 5),
        at("A", "before-iteration", 5),
        at("A", "after-iteration", 6),
    ]
    b = [at("B", "on-load", 5), at("B", "before-iteration", 5), at("B", "after-iteration", 6)]
    assert [(one.title, other.title) for one, other in pair_up(a, b)] == [
        ("A (after-iteration 5)", "A (on-save 5)"),
        ("A (on-save 5)", "A (before-iteration 6)"),
        ("A (on-save 5)", "B (on-load 5)"),
        ("B (on-load 5)", "B (before-iteration 6)"),
        ("A (after-iteration 6)", "B (after-iteration 6)"),
    ]


def test_nothing_in_common_is_no_comparison() -> None:
    assert (
        pair_up(
            [at("A", "after-iteration", 5), at("A", "before-iteration", 5)],
            [at("B", "on-load", 9)] * 2,
        )
        == []
    )
    one, other = [at("A", "after-iteration", 5)], [at("B", "after-iteration", 9)]
    assert pair_up(one, other) == [(one[0], other[0])]


def test_the_text_fits_in_80_columns_and_says_what_to_look_at() -> None:
    spoil = {("embedding.word.weight", rank): add for rank in (4, 5, 6, 7)}
    a = dumped(whole(), spoil=spoil, facts=COUNTERS)
    b = dumped(whole(), facts=COUNTERS | {"optimizer_step": 0}, label="B")
    result = {"a": "/run/a", "b": "/run/b", **document(verdict([a], [b]))}
    text = describe(result)
    assert max(map(len, text.splitlines())) <= 80
    lines = text.splitlines()
    assert lines[:4] == [
        "A: /run/a", "B: /run/b", f"DIFFERENT: {result['numbers']} numbers in one comparison",
        "first: embedding.word.weight",
    ]  # fmt: skip
    assert (
        "1. OPTIMIZER STEP: optimizer_step" in lines
        and "2. COPY ON ANOTHER STAGE: embedding.word.weight" in lines
    )
    assert text.count("means:") == text.count("look at:") == 2
    assert "16 of 16 numbers differ, by up to 0.5" in text
    equal = describe({"a": "x", "b": "y", **document(verdict([b], [replace(b, label="C")]))})
    assert equal.splitlines()[2].startswith("EQUAL: ")


# ----------------------------------------------------------------------------- compare
# Tensors of two states: what NumPy finds in the whole tensors, the diff finds in whatever pieces
# they lie.

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

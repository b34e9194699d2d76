"""Which blocks are recomputed, and what that costs: pure rules of the card."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.cases import tiny
from tests.trainer.schedule_cards import card_of
from trainer.config.card import ModelSection, TrainerConfig
from trainer.config.kernel_choice import recomputed_between, recomputed_blocks, recomputed_part
from trainer.schedule import flops
from trainer.schedule.rules import cross_problems


def model(layers: int, **keys: object) -> ModelSection:
    return ModelSection.model_validate(
        {"layers": layers, "hidden_size": 64, "attention_heads": 4, "sequence_length": 16} | keys
    )


@given(layers=st.integers(1, 64), blocks=st.integers(1, 64), stages=st.integers(1, 8))
def test_blocks_are_dealt_evenly(layers: int, blocks: int, stages: int) -> None:
    blocks = min(blocks, layers)
    card = model(layers, activation_checkpointing=True, recompute_blocks=blocks)
    chosen = [recomputed_part(card, block) for block in range(layers)]
    assert chosen.count("block") == recomputed_blocks(card) == blocks
    each = layers // stages
    counts = [recomputed_between(card, stage * each, each) for stage in range(stages)]
    assert max(counts) - min(counts) <= 1
    for stage, count in enumerate(counts):
        assert count == chosen[stage * each : (stage + 1) * each].count("block")


def test_none_and_all_are_what_the_switch_alone_says() -> None:
    assert {recomputed_part(model(5), block) for block in range(5)} == {"nothing"}
    assert {
        recomputed_part(model(5, activation_checkpointing=True), block) for block in range(5)
    } == {"block"}
    selective = model(5, activation_checkpointing=True, recompute_granularity="selective")
    assert {recomputed_part(selective, block) for block in range(5)} == {"attention"}


def test_the_operations_are_those_of_what_is_recomputed() -> None:
    plain, whole = model(4), model(4, activation_checkpointing=True)
    some = model(4, activation_checkpointing=True, recompute_blocks=1)
    scores = model(4, activation_checkpointing=True, recompute_granularity="selective")
    base, full, part, inner = (
        flops.hardware_flops(card_of(card, 100), 3) for card in (plain, whole, some, scores)
    )
    assert (full - base) == 4 * (part - base)
    # samples, blocks, operations of 16 x 16 scores of width 64
    assert inner - base == 3 * 4 * 4 * 16 * 16 * 64
    assert [flops.passes(card) for card in (plain, some, whole)] == [3.0, 3.25, 4.0]
    assert 3.0 < flops.passes(scores) < 3.25


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"recompute_blocks": 1}, "model.recompute_blocks"),
        ({"recompute_blocks": 3, "activation_checkpointing": True}, "model.recompute_blocks"),
        ({"recompute_granularity": "selective"}, "model.recompute_granularity"),
        (
            {
                "recompute_granularity": "selective",
                "activation_checkpointing": True,
                "partition_activations": True,
            },
            "model.recompute_granularity",
        ),
    ],
)
def test_contradictions_are_refused(keys: dict[str, object], named: str) -> None:
    value = tiny().model_dump(mode="json")
    value["model"] |= keys
    assert named in {
        problem.key for problem in cross_problems(TrainerConfig.model_validate(value), 1)
    }

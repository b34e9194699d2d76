"""Where a training begins far above an even guess, said before it begins."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import create_model

from tests.trainer.cases import VOCABULARY, tiny
from tests.trainer.spawn import run_ranks
from trainer.config.base import CardError, validate
from trainer.config.card import TrainerConfig
from trainer.config.first_loss import first_loss
from trainer.config.model import OLD_NAMES, OptimizerSection
from trainer.engine import Engine
from trainer.optim.build import lamb_rules
from trainer.optim.lamb import FLOOR, LambRules, NormOf
from trainer.parallel.mesh import Mesh


def wide(vocabulary: int = VOCABULARY, **model: Any) -> TrainerConfig:
    value = tiny(embedding_layernorm=True).model_dump(mode="json")
    value["model"] |= {"attention_heads": 4, **model}
    value["tokenizer"]["padded_vocabulary_size"] = vocabulary
    return TrainerConfig.model_validate(value)


def begins_at(config: TrainerConfig) -> float:
    """The loss of a model with initial weights on random tokens."""
    engine = Engine.build(
        config, Mesh.create(config.parallel, torch.device("cpu")), for_training=False
    )
    tokens = torch.randint(
        0,
        VOCABULARY,
        (4, config.model.sequence_length + 1),
        generator=torch.Generator().manual_seed(1),
    )
    return float(
        engine.measure(iter([(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]), 1).loss
    )


def test_a_real_model_begins_where_it_is_said_to() -> None:
    config = wide(hidden_size=512, init_std=0.04)
    expected = first_loss(config)
    assert expected is not None and expected.even == math.log(VOCABULARY)
    calm = wide(hidden_size=512, init_std=expected.init_std)
    assert first_loss(calm) is None
    (found,) = run_ranks(begins_at, 1, config)
    (even,) = run_ranks(begins_at, 1, calm)
    assert found == pytest.approx(expected.expected, rel=0.1)
    assert even == pytest.approx(expected.even, abs=0.8)


@pytest.mark.parametrize(
    ("size", "vocabulary", "std", "measured"),
    [
        (512, 4096, 0.02, 10.38),
        (1024, 4096, 0.02, 19.11),
        (2048, 16384, 0.02, 31.97),
        (1024, 4096, 0.01804, 17.63),
    ],
)
def test_models_of_two_blocks_that_were_measured(
    size: int, vocabulary: int, std: float, measured: float
) -> None:
    expected = first_loss(wide(vocabulary, hidden_size=size, init_std=std))
    assert expected is not None and expected.expected == pytest.approx(measured, rel=0.05)
    assert f"near {expected.expected:.0f}, not ln(vocabulary) = {math.log(vocabulary):.1f}" in str(
        expected
    )


@pytest.mark.parametrize(
    "model",
    [
        {"tied_embeddings": False},
        {"embedding_layernorm": False},
        {"init_method": "xavier"},
        {"init_std": 0.004},
    ],
)
def test_others_begin_as_an_even_guess(model: dict[str, Any]) -> None:
    assert first_loss(wide(hidden_size=1024, **{"init_std": 0.02, **model})) is None


# ----------------------------------------------------------------------------- optimizer names
# Names of the large-batch trainer's optimizers in a card.

RULES = {
    "mylamb": LambRules(floor=FLOOR),
    "mylamb2": LambRules(floor=FLOOR),
    "mylamb3": LambRules(floor=FLOOR, corrects_mean=False, embedding_alpha=1.0),
    "lambtp": LambRules(norm_of=NormOf.LOCAL),
}


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_is_what_it_was(old: str) -> None:
    section = OptimizerSection.model_validate({"type": old})
    assert section == OptimizerSection.model_validate(OLD_NAMES[old])
    assert section == OptimizerSection.model_validate(section.model_dump())
    assert section.type == ("adamw" if old == "ptadamw" else "lamb")
    if old in RULES:
        assert lamb_rules(section) == RULES[old]


def test_the_ways_of_taking_norms_can_be_chosen() -> None:
    section = OptimizerSection.model_validate({"type": "lambtp", "lamb_norms": "stale"})
    assert (section.type, section.lamb_variant, section.lamb_norms) == ("lamb", "paper", "stale")


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"type": "mylamb2", "lamb_variant": "paper"},
            'type = "mylamb2" means lamb_variant = "layer-noise", not "paper"; leave lamb_variant out, or write '
            'type = "lamb"',
        ),
        (
            {"type": "mylamb4"},
            "optimizer.type = 'mylamb4': must be 'adamw', 'adam8bit' or 'lamb'; choose one of these",
        ),
        (
            {"type": ["mylamb"]},
            "optimizer.type = ['mylamb']: must be 'adamw', 'adam8bit' or 'lamb'",
        ),
    ],
)
def test_what_contradicts_a_name_is_refused(keys: dict[str, Any], line: str) -> None:
    card = create_model("Card", optimizer=(OptimizerSection, ...))
    with pytest.raises(CardError) as refused:
        validate(card, {"optimizer": keys}, "x.toml")
    (problem,) = refused.value.problems
    assert line in str(problem)

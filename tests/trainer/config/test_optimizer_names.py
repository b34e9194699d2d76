"""Names of the large-batch trainer's optimizers in a card."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import create_model

from trainer.config.base import CardError, validate
from trainer.config.model import OLD_NAMES, OptimizerSection
from trainer.optim.build import lamb_rules
from trainer.optim.lamb import FLOOR, LambRules, NormOf

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

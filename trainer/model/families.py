"""The kinds of models that this trainer knows, by their names in the run card."""

from __future__ import annotations

from trainer.config.card import ModelSection
from trainer.model.bert import BertFamily
from trainer.model.family import Family
from trainer.model.gpt import GPTFamily
from trainer.model.t5 import T5Family

FAMILIES: dict[str, Family] = {
    "gpt": GPTFamily(),
    "bert": BertFamily(),
    "t5": T5Family(),
}


def family_of(model: ModelSection) -> Family:
    """What `model.family` names."""
    return FAMILIES[model.family]

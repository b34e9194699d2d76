"""A Megatron-BERT of the `transformers` library as the source of a checkpoint: the inverse of the
export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.huggingface.import_ import HuggingFaceFolder, ImportedTensor
from trainer.checkpoint.huggingface.megatron_bert import bert_tensors, facts_of_config
from trainer.checkpoint.huggingface.names import ROWS_KEY, WORDS
from trainer.contract.record import JsonObject
from trainer.schedule.ends import TOKEN_TYPES

WORD_BIAS = "heads.word_bias"


class MegatronBertFolder(HuggingFaceFolder):
    """A folder with a Megatron-BERT and both heads of its pre-training."""

    kind = "Megatron-BERT for pre-training"
    vocabulary = frozenset({WORDS, WORD_BIAS})

    def describe(self, config: JsonObject, path: str) -> JsonObject:
        return facts_of_config(config, path)

    def tensors_of(self, facts: Mapping[str, Any], present: set[str]) -> dict[str, ImportedTensor]:
        names: dict[str, list[str]] = {}
        for theirs, item in bert_tensors(facts).items():
            names.setdefault(item.key, []).append(theirs)
        heads = facts["model.attention_heads"]
        return {
            key: ImportedTensor(_shape(key, facts), tuple(own), heads, (1,) * len(own))
            for key, own in names.items()
        }

    def copies(self) -> dict[str, str]:
        return {"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": WORD_BIAS}

    def is_passed_over(self, name: str) -> bool:
        return name == "bert.embeddings.position_ids"  # a row of numbers that older versions saved


def _shape(key: str, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """The whole shape of our tensor."""
    hidden, ffn = facts["model.hidden_size"], facts["model.ffn_hidden_size"]
    tables = {
        WORDS: (facts[ROWS_KEY], hidden),
        WORD_BIAS: (facts[ROWS_KEY],),
        "embedding.position.weight": (facts["model.max_position_embeddings"], hidden),
        "embedding.type.weight": (TOKEN_TYPES, hidden),
    }
    if key in tables:
        return tables[key]
    part, kind = key.rsplit(".", 1)
    if part.startswith("blocks."):
        name = part.split(".", 2)[2]
    else:
        name = part
    matrices = {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.up": (ffn, hidden),
        "mlp.down": (hidden, ffn),
        "heads.transform": (hidden, hidden),
        "heads.pooler": (hidden, hidden),
        "heads.order": (2, hidden),
    }
    if name not in matrices:  # a LayerNorm
        return (hidden,)
    if kind == "weight":
        return matrices[name]
    return matrices[name][:1]

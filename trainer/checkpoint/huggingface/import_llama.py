"""A Llama or Qwen3 of the `transformers` library as the source of a checkpoint: the inverse of the
export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.huggingface.import_ import HuggingFaceFolder, ImportedTensor
from trainer.checkpoint.huggingface.llama import HEAD, facts_of_config, llama_tensors
from trainer.checkpoint.huggingface.mapped import MappedTensor
from trainer.checkpoint.huggingface.names import ROWS_KEY, WORDS
from trainer.contract.record import JsonObject


class LlamaFolder(HuggingFaceFolder):
    """A folder with a Llama or a Qwen3 and its language-model head."""

    kind = "Llama or Qwen3 language model"

    def describe(self, config: JsonObject, path: str) -> JsonObject:
        facts = facts_of_config(config, path)
        self.is_tied = facts["model.tied_embeddings"]
        self.vocabulary = frozenset({WORDS} if self.is_tied else {WORDS, HEAD})
        return facts

    def tensors_of(self, facts: Mapping[str, Any], present: set[str]) -> dict[str, ImportedTensor]:
        parts: dict[str, dict[str, MappedTensor]] = {}
        for theirs, item in llama_tensors(facts).items():
            parts.setdefault(item.key, {})[theirs] = item
        groups = facts["model.key_value_heads"]
        found = {}
        for key, own in parts.items():
            is_fused = len(own) > 1 and not any(item.is_stacked for item in own.values())
            counts = tuple(item.count for item in own.values())
            found[key] = ImportedTensor(
                _shape(key, facts), tuple(own), groups if is_fused else 0, counts
            )
        return found

    def copies(self) -> dict[str, str]:
        if self.is_tied:
            return {"lm_head.weight": WORDS}
        return {}

    def is_passed_over(self, name: str) -> bool:
        return name.endswith(".rotary_emb.inv_freq")  # a row of numbers that older versions saved


def _shape(key: str, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """The whole shape of our tensor."""
    hidden, ffn, size = (
        facts["model.hidden_size"],
        facts["model.ffn_hidden_size"],
        facts["model.kv_channels"],
    )
    width, groups = facts["model.attention_heads"] * size, facts["model.key_value_heads"]
    if key in (WORDS, HEAD):
        return (facts[ROWS_KEY], hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "attention.query_key_value": (width + 2 * groups * size, hidden),
        "attention.dense": (hidden, width),
        "attention.query_norm": (size,),
        "attention.key_norm": (size,),
        "mlp.up": (2, ffn, hidden),
        "mlp.down": (hidden, ffn),
    }
    name = key.removesuffix(".weight").split(".", 2)[-1]
    return shapes.get(name, (hidden,))  # else a norm on the residual stream

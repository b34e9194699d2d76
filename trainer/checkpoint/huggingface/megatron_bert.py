"""The Megatron-BERT architecture of the `transformers` library: its tensors, its config.json, and what it can express.

It is an encoder that normalises before each part, as ours. Query, key and value are three matrices there; ours are one
whose rows are [heads, 3, head size].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.contract.checkpoints import CheckpointError

MODEL_TYPE = "megatron-bert"
_ENDS = {
    "embedding.word.weight": "bert.embeddings.word_embeddings.weight",
    "embedding.position.weight": "bert.embeddings.position_embeddings.weight",
    "embedding.type.weight": "bert.embeddings.token_type_embeddings.weight",
    "final_norm.weight": "bert.encoder.ln.weight",
    "final_norm.bias": "bert.encoder.ln.bias",
    "heads.transform.weight": "cls.predictions.transform.dense.weight",
    "heads.transform.bias": "cls.predictions.transform.dense.bias",
    "heads.transform_norm.weight": "cls.predictions.transform.LayerNorm.weight",
    "heads.transform_norm.bias": "cls.predictions.transform.LayerNorm.bias",
    "heads.word_bias": "cls.predictions.bias",
    "heads.pooler.weight": "bert.pooler.dense.weight",
    "heads.pooler.bias": "bert.pooler.dense.bias",
    "heads.order.weight": "cls.seq_relationship.weight",
    "heads.order.bias": "cls.seq_relationship.bias",
}
_BLOCK_PARTS = {
    "input_norm": "attention.ln",
    "attention.dense": "attention.output.dense",
    "post_attention_norm": "ln",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_FUSED = "attention.query_key_value"
_SPLIT = ("attention.self.query", "attention.self.key", "attention.self.value")
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class BertTensor:
    """Where a tensor of theirs comes from: our name, and which of query, key and value, where ours is all three."""

    key: str
    part: int | None = None


@dataclass(frozen=True)
class FusedRows:
    """The rows of one of query, key and value (`part` 0, 1, 2) in ours, which are [heads, 3, head size]."""

    heads: int
    part: int

    def blocks(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes in our tensor, a head at a time, of theirs of `shape`."""
        size, rest = shape[0] // self.heads, shape[1:]
        for head in range(self.heads):
            yield ((3 * head + self.part) * size, *(0 for _ in rest)), (size, *rest)


def bert_tensors(layers: int) -> dict[str, BertTensor]:
    """Every tensor of their pre-training model, by its name there, but for copies of tied ones."""
    found = {theirs: BertTensor(ours) for ours, theirs in _ENDS.items()}
    for layer in range(layers):
        for kind in ("weight", "bias"):
            for ours, theirs in _BLOCK_PARTS.items():
                found[f"bert.encoder.layer.{layer}.{theirs}.{kind}"] = BertTensor(f"blocks.{layer}.{ours}.{kind}")
            for part, theirs in enumerate(_SPLIT):
                fused = BertTensor(f"blocks.{layer}.{_FUSED}.{kind}", part)
                found[f"bert.encoder.layer.{layer}.{theirs}.{kind}"] = fused
    return found


def bert_config(facts: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The model's config.json, from its facts under the card's keys. Raises CheckpointError for what it cannot say."""
    needed = ("layers", "hidden_size", "attention_heads", "ffn_hidden_size", "max_position_embeddings", "activation")
    for name in (*(f"model.{each}" for each in needed), "tokenizer.padded_vocabulary_size"):
        if name not in facts:
            raise CheckpointError(f"{name} is not known from the checkpoint: name its run card with --run")
    hidden, heads = facts["model.hidden_size"], facts["model.attention_heads"]
    head = facts.get("model.kv_channels", hidden // heads)
    if head * heads != hidden:
        raise CheckpointError(
            f"model.kv_channels = {head}: the Megatron-BERT architecture of Hugging Face has only {hidden // heads}, "
            "so this model cannot be written as one"
        )
    return {
        "architectures": ["MegatronBertForPreTraining"],
        "model_type": MODEL_TYPE,
        "vocab_size": facts["tokenizer.padded_vocabulary_size"],
        "hidden_size": hidden,
        "num_hidden_layers": facts["model.layers"],
        "num_attention_heads": heads,
        "intermediate_size": facts["model.ffn_hidden_size"],
        "hidden_act": _ACTIVATIONS[facts["model.activation"]],
        "max_position_embeddings": facts["model.max_position_embeddings"],
        "type_vocab_size": 2,
        "layer_norm_eps": facts.get("model.layernorm_epsilon", 1e-5),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "dtype": dtype,
        "torch_dtype": dtype,  # the same, for transformers < 4.56
    }

"""The Megatron-BERT architecture of the `transformers` library: its tensors, its config.json, and
what it can express.

It is an encoder that normalises before each part, as ours. Query, key and value are three matrices
there; ours are one whose rows are [heads, 3, head size].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.huggingface.mapped import (
    ROWS_KEY,
    WORD_BIAS,
    WORDS,
    Architecture,
    MappedTensor,
    count_of,
    epsilon_of,
    needed_fact,
    only,
)
from trainer.contract.errors import CheckpointError
from trainer.contract.record import JsonObject

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
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_READ_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {
    "gelu_new": "gelu_tanh"
}


def bert_tensors(facts: Mapping[str, Any]) -> dict[str, MappedTensor]:
    """Every tensor of their pre-training model, by its name there, but for copies of tied ones."""
    layers = needed_fact(facts, "model.layers")
    found = {theirs: MappedTensor(ours) for ours, theirs in _ENDS.items()}
    for layer in range(layers):
        for kind in ("weight", "bias"):
            for ours, theirs in _BLOCK_PARTS.items():
                found[f"bert.encoder.layer.{layer}.{theirs}.{kind}"] = MappedTensor(
                    f"blocks.{layer}.{ours}.{kind}"
                )
            for part, theirs in enumerate(_SPLIT):
                fused = MappedTensor(f"blocks.{layer}.{_FUSED}.{kind}", part)
                found[f"bert.encoder.layer.{layer}.{theirs}.{kind}"] = fused
    return found


def bert_config(facts: Mapping[str, Any], dtype: str) -> JsonObject:
    """The model's config.json, from its facts under the card's keys. Raises CheckpointError for
    what it cannot say.
    """
    hidden = needed_fact(facts, "model.hidden_size")
    heads = needed_fact(facts, "model.attention_heads")
    only(facts, {"model.kv_channels": hidden // heads}, "Megatron-BERT")
    return {
        "architectures": ["MegatronBertForPreTraining"],
        "model_type": MODEL_TYPE,
        "vocab_size": needed_fact(facts, ROWS_KEY),
        "hidden_size": hidden,
        "num_hidden_layers": needed_fact(facts, "model.layers"),
        "num_attention_heads": heads,
        "intermediate_size": needed_fact(facts, "model.ffn_hidden_size"),
        "hidden_act": ACTIVATIONS[needed_fact(facts, "model.activation")],
        "max_position_embeddings": needed_fact(facts, "model.max_position_embeddings"),
        "type_vocab_size": 2,
        "layer_norm_eps": facts.get("model.layernorm_epsilon", 1e-5),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "dtype": dtype,
        "torch_dtype": dtype,  # the same, for transformers < 4.56
    }


def facts_of_config(config: Mapping[str, Any], path: str) -> JsonObject:
    """The model's facts under the card's keys, of its config.json. Raises CheckpointError naming
    `path` and the key.
    """
    fixed = {
        "model_type": (MODEL_TYPE, None),
        "type_vocab_size": (2, 2),
        "position_embedding_type": ("absolute", "absolute"),
        "tie_word_embeddings": (True, True),
        "is_decoder": (False, False),
    }
    for key, (value, default) in fixed.items():
        if config.get(key, default) != value:
            raise CheckpointError(
                f"{path}: {key} = {config.get(key)!r}: only {value!r} can be imported as a BERT"
            )
    counts = {
        "model.layers": "num_hidden_layers",
        "model.hidden_size": "hidden_size",
        "model.attention_heads": "num_attention_heads",
        "model.ffn_hidden_size": "intermediate_size",
        "model.max_position_embeddings": "max_position_embeddings",
        ROWS_KEY: "vocab_size",
    }
    facts: JsonObject = {"model.family": "bert"} | {
        ours: count_of(config, path, theirs) for ours, theirs in counts.items()
    }
    hidden = facts["model.hidden_size"]
    heads = facts["model.attention_heads"]
    if hidden % heads:
        raise CheckpointError(
            f"{path}: num_attention_heads = {heads}: must divide hidden_size = {hidden}"
        )
    activation = config.get("hidden_act", "gelu")
    if activation not in _READ_ACTIVATIONS:
        known = ", ".join(_READ_ACTIVATIONS)
        raise CheckpointError(f"{path}: hidden_act = {activation!r}: only {known} can be imported")
    return facts | {
        "model.kv_channels": hidden // heads,
        "model.activation": _READ_ACTIVATIONS[activation],
        "model.position_embedding": "absolute",
        "model.embedding_layernorm": False,
        "model.layernorm_epsilon": epsilon_of(config, path, "layer_norm_eps", 1e-12),
    }


BERT = Architecture(
    "Megatron-BERT for pre-training",
    (MODEL_TYPE,),
    bert_tensors,
    bert_config,
    facts=facts_of_config,
    copies={"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": WORD_BIAS},
    ignored=("bert.embeddings.position_ids",),  # a row of numbers that older versions saved
)

"""The BLOOM architecture of the `transformers` library: its tensors, its config.json, and which
models it can express.

Our fused query-key-value rows are [heads, 3, head size], which is also BLOOM's order, so tensors
keep their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.huggingface.mapped import (
    ROWS_KEY,
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
from trainer.contract.resumable import UNNAMED

_ROOT = "transformer."
_BLOCK_PARTS = {
    "input_layernorm": "input_norm",
    "self_attention.query_key_value": "attention.query_key_value",
    "self_attention.dense": "attention.dense",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
_ASSUMED: JsonObject = {"model.activation": "gelu_tanh", "model.layernorm_epsilon": 1e-5}


def bloom_tensors(facts: Mapping[str, Any]) -> dict[str, MappedTensor]:
    """Every tensor of theirs, by its name there, in the order of the model."""
    parts = {"word_embeddings_layernorm": "embedding.norm"}
    for layer in range(needed_fact(facts, "model.layers")):
        parts |= {
            f"h.{layer}.{theirs}": f"blocks.{layer}.{ours}" for theirs, ours in _BLOCK_PARTS.items()
        }
    parts["ln_f"] = "final_norm"
    return {f"{_ROOT}word_embeddings.weight": MappedTensor(WORDS)} | {
        f"{_ROOT}{theirs}.{kind}": MappedTensor(f"{ours}.{kind}")
        for theirs, ours in parts.items()
        for kind in ("weight", "bias")
    }


def bloom_config(facts: Mapping[str, Any], dtype: str) -> JsonObject:
    """The model's config.json, from its facts under the card's keys. Raises CheckpointError for
    what it cannot say: MLPs are 4 x hidden_size wide, heads hidden_size / attention_heads.
    """
    layers = needed_fact(facts, "model.layers")
    hidden = needed_fact(facts, "model.hidden_size")
    heads = needed_fact(facts, "model.attention_heads")
    fixed = {
        "model.position_embedding": "alibi",
        "model.embedding_layernorm": True,
        "model.ffn_hidden_size": 4 * hidden,
        "model.kv_channels": hidden // heads,
        "model.activation": "gelu_tanh",
        "model.key_value_heads": heads,
        **UNNAMED,
    }
    only(facts, fixed, "BLOOM")
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": needed_fact(facts, ROWS_KEY),
        "hidden_size": hidden,
        "n_layer": layers,
        "n_head": heads,
        "layer_norm_epsilon": needed_fact(facts, "model.layernorm_epsilon"),
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "slow_but_exact": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        # Named even when unknown: a reader would otherwise take the ids of BLOOM's own vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,  # the same, for transformers < 4.56
    }


def facts_of_config(config: Mapping[str, Any], path: str) -> JsonObject:
    """The model's facts under the card's keys, of its config.json, old spellings too. Raises
    CheckpointError naming `path` and the key.
    """
    if config.get("model_type") != "bloom":
        raise CheckpointError(
            f"{path}: model_type = {config.get('model_type')!r}: only 'bloom' can be imported"
        )
    if config.get("apply_residual_connection_post_layernorm", False):
        raise CheckpointError(
            f"{path}: apply_residual_connection_post_layernorm = true: this trainer's blocks have no such connection"
        )
    if config.get("tie_word_embeddings", True) is not True:
        raise CheckpointError(
            f"{path}: tie_word_embeddings = false: input and output embedding are one weight here"
        )
    epsilon = epsilon_of(
        config, path, "layer_norm_epsilon", default=_ASSUMED["model.layernorm_epsilon"]
    )
    layers = count_of(config, path, "n_layer", "num_hidden_layers")
    hidden = count_of(config, path, "hidden_size", "n_embed")
    heads = count_of(config, path, "n_head", "num_attention_heads")
    return UNNAMED | {
        "model.layers": layers,
        "model.hidden_size": hidden,
        "model.attention_heads": heads,
        "model.key_value_heads": heads,
        "model.kv_channels": hidden // heads,
        "model.ffn_hidden_size": 4 * hidden,
        "model.activation": "gelu_tanh",
        "model.position_embedding": "alibi",
        "model.embedding_layernorm": True,
        "model.layernorm_epsilon": epsilon,
        ROWS_KEY: count_of(config, path, "vocab_size"),
    }


BLOOM = Architecture(
    "BLOOM language model",
    ("bloom",),
    bloom_tensors,
    bloom_config,
    facts=facts_of_config,
    copies={"lm_head.weight": WORDS},
    root=_ROOT,
    length="seq_length",
    assumed=_ASSUMED,
    cuts_padding=True,
)

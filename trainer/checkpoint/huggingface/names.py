"""The BLOOM architecture of the `transformers` library: its tensors, its config.json, and which
models it can express.

Our fused query-key-value rows are [heads, 3, head size], which is also BLOOM's order, so tensors
keep their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer.config.card import TrainerConfig
from trainer.contract.errors import CheckpointError
from trainer.contract.record import JsonObject, Record
from trainer.contract.resumable import UNNAMED, model_facts

# before all names in a causal language model's files; absent in those of the bare model
ROOT = "transformer."
HEAD = "lm_head.weight"  # the tied output projection, which some files repeat
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}

_PREFIXES = {
    "embedding.word.": "word_embeddings.",
    "embedding.norm.": "word_embeddings_layernorm.",
    "final_norm.": "ln_f.",
}
_BLOCK_PARTS = {
    "input_norm": "input_layernorm",
    "attention.query_key_value": "self_attention.query_key_value",
    "attention.dense": "self_attention.dense",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_NEEDED = ("layers", "hidden_size", "attention_heads")
_DEFAULTS = {"activation": "gelu_tanh", "layernorm_epsilon": 1e-5}


class BloomShape(Record):
    """All numbers that make a BLOOM: MLPs are 4 x hidden_size wide, heads hidden_size /
    attention_heads.
    """

    layers: int
    hidden_size: int
    attention_heads: int
    vocabulary_size: int
    layernorm_epsilon: float


class BloomTensor(Record):
    """A tensor's BLOOM name, without ROOT, and its whole shape."""

    name: str
    shape: tuple[int, ...]


def bloom_tensors(shape: BloomShape) -> dict[str, BloomTensor]:
    """Every tensor of the model by our logical name, in the order of the model."""
    hidden = shape.hidden_size
    norm: dict[str, tuple[int, ...]] = {"weight": (hidden,), "bias": (hidden,)}
    parts: dict[str, dict[str, tuple[int, ...]]] = {
        "input_norm": norm,
        "attention.query_key_value": {"weight": (3 * hidden, hidden), "bias": (3 * hidden,)},
        "attention.dense": {"weight": (hidden, hidden), "bias": (hidden,)},
        "post_attention_norm": norm,
        "mlp.up": {"weight": (4 * hidden, hidden), "bias": (4 * hidden,)},
        "mlp.down": {"weight": (hidden, 4 * hidden), "bias": (hidden,)},
    }
    found: dict[str, tuple[int, ...]] = {"embedding.word.weight": (shape.vocabulary_size, hidden)}
    found |= {f"embedding.norm.{kind}": size for kind, size in norm.items()}
    for layer in range(shape.layers):
        for part, kinds in parts.items():
            found |= {f"blocks.{layer}.{part}.{kind}": size for kind, size in kinds.items()}
    found |= {f"final_norm.{kind}": size for kind, size in norm.items()}
    return {name: BloomTensor(_bloom_name(name), size) for name, size in found.items()}


def _bloom_name(name: str) -> str:
    for ours, theirs in _PREFIXES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    _, layer, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"h.{layer}.{_BLOCK_PARTS[part]}.{kind}"


ROWS_KEY = "tokenizer.padded_vocabulary_size"
WORDS = "embedding.word.weight"
"""Our name of the word embedding, whose rows are those of the vocabulary."""


def facts_of_card(config: TrainerConfig) -> JsonObject:
    """What a run card says of the model, under the keys that a checkpoint's facts have too; not of
    its precision.
    """
    return {key: fact for key, fact in model_facts(config).items() if key != "precision.dtype"}


def facts_of_bloom(shape: BloomShape) -> JsonObject:
    """The same facts of a BLOOM."""
    return UNNAMED | {
        "model.layers": shape.layers,
        "model.hidden_size": shape.hidden_size,
        "model.attention_heads": shape.attention_heads,
        "model.key_value_heads": shape.attention_heads,
        "model.kv_channels": shape.hidden_size // shape.attention_heads,
        "model.ffn_hidden_size": 4 * shape.hidden_size,
        "model.activation": "gelu_tanh",
        "model.position_embedding": "alibi",
        "model.embedding_layernorm": True,
        "model.layernorm_epsilon": shape.layernorm_epsilon,
        "tokenizer.padded_vocabulary_size": shape.vocabulary_size,
    }


def bloom_shape(facts: Mapping[str, Any]) -> tuple[BloomShape, list[str]]:
    """The BLOOM that a model's facts describe, and a remark for each fact that had to be assumed.

    Raises CheckpointError with the first key that BLOOM cannot express, or that is needed and
    unknown.
    """
    for key in (*(f"model.{name}" for name in _NEEDED), "tokenizer.padded_vocabulary_size"):
        if key not in facts:
            raise CheckpointError(
                f"{key} is not known from the checkpoint: name its run card with --run"
            )
    known = {**{f"model.{name}": value for name, value in _DEFAULTS.items()}, **facts}
    hidden, heads = known["model.hidden_size"], known["model.attention_heads"]
    wanted = {
        "model.position_embedding": "alibi",
        "model.embedding_layernorm": True,
        "model.ffn_hidden_size": 4 * hidden,
        "model.kv_channels": hidden // heads,
        "model.activation": "gelu_tanh",
        "model.key_value_heads": heads,
        **UNNAMED,
    }
    for key, value in wanted.items():
        if known.get(key, value) != value:
            raise CheckpointError(
                f"{key} = {known[key]!r}: the BLOOM architecture of Hugging Face has only {value!r}, so this model "
                "cannot be written or read as one"
            )
    shape = BloomShape(
        layers=known["model.layers"],
        hidden_size=hidden,
        attention_heads=heads,
        vocabulary_size=known["tokenizer.padded_vocabulary_size"],
        layernorm_epsilon=known["model.layernorm_epsilon"],
    )
    assumed = [f"model.{name}" for name in _DEFAULTS if f"model.{name}" not in facts]
    return shape, [
        f"{key} is not in the checkpoint: {known[key]!r} assumed (--run CARD tells)"
        for key in assumed
    ]


def config_document(shape: BloomShape, dtype: str, extra: Mapping[str, Any]) -> JsonObject:
    """The model's config.json. `dtype`: a key of DTYPES. `extra`: what else is known under BLOOM's
    own keys.
    """
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": shape.vocabulary_size,
        "hidden_size": shape.hidden_size,
        "n_layer": shape.layers,
        "n_head": shape.attention_heads,
        "layer_norm_epsilon": shape.layernorm_epsilon,
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
        "dtype": str(DTYPES[dtype]).removeprefix("torch."),
        # the same, for transformers < 4.56
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
        **extra,
    }


def shape_of_config(config: Mapping[str, Any], path: str) -> BloomShape:
    """The shape that a config.json describes, old spellings too. Raises CheckpointError naming
    `path` and the key.
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

    def count(*spellings: str) -> int:
        value = next((config[name] for name in spellings if config.get(name) is not None), None)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(
                f"{path}: {spellings[0]} = {value!r}: must be a whole number above 0"
            )
        return value

    epsilon = config.get("layer_norm_epsilon", _DEFAULTS["layernorm_epsilon"])
    if not isinstance(epsilon, float) or not 0.0 < epsilon < 1.0:
        raise CheckpointError(
            f"{path}: layer_norm_epsilon = {epsilon!r}: must be a number between 0 and 1"
        )

    return BloomShape(
        layers=count("n_layer", "num_hidden_layers"),
        hidden_size=count("hidden_size", "n_embed"),
        attention_heads=count("n_head", "num_attention_heads"),
        vocabulary_size=count("vocab_size"),
        layernorm_epsilon=epsilon,
    )

"""The Llama and Qwen3 architectures of the `transformers` library: tensors, config.json, and what
they can express.

Qwen3 is Llama with a norm of each head's queries and keys. Query, key and value are three matrices
there; ours are one whose rows are [groups, queries + 2, head size]. Gate and up are two there, and
one behind the other in ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.huggingface.mapped import (
    HEAD,
    ROWS_KEY,
    WORDS,
    Architecture,
    MappedTensor,
    count_of,
    needed_fact,
    only,
)
from trainer.contract.errors import CheckpointError
from trainer.contract.record import JsonObject
from trainer.contract.resumable import UNNAMED

MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_BLOCK = {
    "input_layernorm": "input_norm",
    "self_attn.o_proj": "attention.dense",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.down_proj": "mlp.down",
}
_QK_NORMS = {"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"}
_FIXED: JsonObject = {
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.linear_biases": False,
    "model.position_embedding": "rotary",
    "model.embedding_layernorm": False,
}
_USUAL_LENGTH = 2048
_STRETCHED = "llama3"  # their word for positions stretched as Llama 3.1's
_LENGTH = "model.rotary_original_length"
_STRETCH = {
    _LENGTH: "original_max_position_embeddings",
    "model.rotary_low_factor": "low_freq_factor",
    "model.rotary_high_factor": "high_freq_factor",
}


def is_llama(facts: Mapping[str, Any]) -> bool:
    """Whether a GPT is nearer to these than to BLOOM: what it lacks of them is then said by
    `llama_config`.
    """
    return facts.get("model.norm") == "rmsnorm" or facts.get("model.activation") == "swiglu"


def llama_tensors(facts: Mapping[str, Any]) -> dict[str, MappedTensor]:
    """Every tensor of theirs, by its name there, but for a copy of a tied head."""
    queries = needed_fact(facts, "model.attention_heads") // needed_fact(
        facts, "model.key_value_heads"
    )
    block = _BLOCK | (_QK_NORMS if facts.get("model.qk_norm") else {})
    found = {"model.embed_tokens.weight": MappedTensor(WORDS)}
    for layer in range(needed_fact(facts, "model.layers")):
        theirs = f"model.layers.{layer}."
        ours = f"blocks.{layer}."
        fused = f"{ours}attention.query_key_value.weight"
        for part, count, name in ((0, queries, "q"), (queries, 1, "k"), (queries + 1, 1, "v")):
            item = MappedTensor(fused, part, queries + 2, count=count)
            found[f"{theirs}self_attn.{name}_proj.weight"] = item
        for part, name in enumerate(("gate", "up")):
            item = MappedTensor(f"{ours}mlp.up.weight", part, 2, is_stacked=True)
            found[f"{theirs}mlp.{name}_proj.weight"] = item
        found |= {
            f"{theirs}{name}.weight": MappedTensor(f"{ours}{own}.weight")
            for name, own in block.items()
        }
    found["model.norm.weight"] = MappedTensor("final_norm.weight")
    if not facts["model.tied_embeddings"]:
        found["lm_head.weight"] = MappedTensor(HEAD)
    return found


def llama_config(facts: Mapping[str, Any], dtype: str) -> JsonObject:
    """The model's config.json, from its facts under the card's keys. Raises CheckpointError for
    what it cannot say.
    """
    kind = "qwen3" if facts["model.qk_norm"] else "llama"
    only(facts, _FIXED, kind.capitalize())
    base = needed_fact(facts, "model.rotary_base")
    stretch = _stretch_said(facts)
    return {
        "architectures": [MODEL_TYPES[kind]],
        "model_type": kind,
        "vocab_size": needed_fact(facts, ROWS_KEY),
        "hidden_size": needed_fact(facts, "model.hidden_size"),
        "intermediate_size": needed_fact(facts, "model.ffn_hidden_size"),
        "num_hidden_layers": needed_fact(facts, "model.layers"),
        "num_attention_heads": needed_fact(facts, "model.attention_heads"),
        "num_key_value_heads": needed_fact(facts, "model.key_value_heads"),
        "head_dim": needed_fact(facts, "model.kv_channels"),
        "hidden_act": "silu",
        "max_position_embeddings": _USUAL_LENGTH,
        "rms_norm_eps": needed_fact(facts, "model.layernorm_epsilon"),
        "rope_theta": base,
        "rope_scaling": stretch,
        # The same, since transformers 5.
        "rope_parameters": {"rope_theta": base, **(stretch or {"rope_type": "default"})},
        "attention_bias": False,
        "attention_dropout": 0.0,
        **(
            {"mlp_bias": False, "pretraining_tp": 1}
            if kind == "llama"
            else {"use_sliding_window": False}
        ),
        "initializer_range": 0.02,
        "tie_word_embeddings": facts["model.tied_embeddings"],
        "use_cache": True,
        # Named even when unknown: a reader would otherwise take the ids of Llama's own vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,  # the same, for transformers < 4.56
    }


def facts_of_config(config: Mapping[str, Any], path: str) -> JsonObject:
    """The model's facts under the card's keys, of its config.json. Raises CheckpointError naming
    `path` and the key.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise CheckpointError(
            f"{path}: model_type = {kind!r}: only 'llama' or 'qwen3' can be imported as such a model"
        )
    fixed = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }
    for key, value in fixed.items():
        if config.get(key, value) != value:
            raise CheckpointError(
                f"{path}: {key} = {config[key]!r}: only {value!r} can be imported"
            )
    heads = count_of(config, path, "num_attention_heads")
    if config.get("num_key_value_heads") is None:
        groups = heads
    else:
        groups = count_of(config, path, "num_key_value_heads")
    if heads % groups:
        raise CheckpointError(
            f"{path}: num_key_value_heads = {groups}: must divide num_attention_heads = {heads}"
        )
    hidden = count_of(config, path, "hidden_size")
    if config.get("head_dim") is None:
        size = hidden // heads
    else:
        size = count_of(config, path, "head_dim")
    return (
        UNNAMED
        | _FIXED
        | {
            "model.qk_norm": kind == "qwen3",
            "model.layers": count_of(config, path, "num_hidden_layers"),
            "model.hidden_size": hidden,
            "model.attention_heads": heads,
            "model.key_value_heads": groups,
            "model.kv_channels": size,
            "model.ffn_hidden_size": count_of(config, path, "intermediate_size"),
            "model.layernorm_epsilon": _number(config, "rms_norm_eps", 1e-6, path),
            **_rotary_facts(config, path),
            "model.tied_embeddings": bool(config.get("tie_word_embeddings", False)),
            ROWS_KEY: count_of(config, path, "vocab_size"),
        }
    )


def _number(config: Mapping[str, Any], key: str, default: float | None, path: str) -> float:
    """`default`: where the key is missing; None where it must not be."""
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"{path}: {key} = {value!r}: must be a number above 0")
    return float(value)


def _stretch_said(facts: Mapping[str, Any]) -> JsonObject | None:
    """How config.json says what stretches the rotary positions; None where nothing does."""
    if facts["model.rotary_factor"] == 1.0:
        return None
    said = {theirs: needed_fact(facts, ours) for ours, theirs in _STRETCH.items()}
    return {"rope_type": _STRETCHED, "factor": facts["model.rotary_factor"], **said}


def _rotary_facts(config: Mapping[str, Any], path: str) -> JsonObject:
    """Of plain rotary positions or of Llama 3.1's stretched ones, where old files and new ones say
    it.
    """
    facts: JsonObject = {"model.rotary_factor": 1.0}
    base = _number(config, "rope_theta", 10_000.0, path)
    for key in ("rope_parameters", "rope_scaling"):
        said = config.get(key)
        if said is None:
            continue
        place = f"{path}: {key}"
        if isinstance(said, Mapping):
            kind = said.get("rope_type", said.get("type", "default"))
        else:
            kind = said
        if kind not in {"default", _STRETCHED} or not isinstance(said, Mapping):
            raise CheckpointError(
                f"{place} = {kind!r}: only plain rotary positions ('default') and those stretched as Llama 3.1's "
                f"({_STRETCHED!r}) can be imported"
            )
        base = _number(said, "rope_theta", base, place)
        if kind == _STRETCHED:
            facts["model.rotary_factor"] = _number(said, "factor", None, place)
            facts[_LENGTH] = count_of(said, place, _STRETCH[_LENGTH])
            for ours in ("model.rotary_low_factor", "model.rotary_high_factor"):
                facts[ours] = _number(said, _STRETCH[ours], None, place)
        break
    return facts | {"model.rotary_base": base}


LLAMA = Architecture(
    "Llama or Qwen3 language model",
    tuple(MODEL_TYPES),
    llama_tensors,
    llama_config,
    facts=facts_of_config,
    copies={"lm_head.weight": WORDS},
    ignored=(".rotary_emb.inv_freq",),  # a row of numbers that older versions saved
    length="max_position_embeddings",
    cuts_padding=True,
)

"""The Blenderbot architecture of the `transformers` library, as which a T5 of ours is written.

It is an encoder-decoder that normalises before each part, with learned positions, biases
everywhere, one table of words for all and a bias of each logit: Megatron's T5. (`transformers`' own
T5 has relative positions, root-mean-square norms, no biases.) It has a table of positions on each
side; ours is both. Query, key and value are matrices of their own there; ours are rows [heads, 3,
head size] of one, or [heads, 2, head size] of key and value of the encoder's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.huggingface.mapped import (
    ROWS_KEY,
    Architecture,
    MappedTensor,
    needed_fact,
    only,
)
from trainer.checkpoint.huggingface.megatron_bert import ACTIVATIONS

MODEL_TYPE = "blenderbot"
LAYERNORM_EPSILON = 1e-5  # which cannot be set there
_ENDS = {
    "model.shared.weight": "embedding.word.weight",
    "model.encoder.embed_positions.weight": "embedding.position.weight",
    "model.decoder.embed_positions.weight": "embedding.position.weight",
    "model.encoder.layer_norm.weight": "encoder_norm.weight",
    "model.encoder.layer_norm.bias": "encoder_norm.bias",
    "model.decoder.layer_norm.weight": "final_norm.weight",
    "model.decoder.layer_norm.bias": "final_norm.bias",
    "final_logits_bias": "head.word_bias",
}
_SELF = {
    "self_attn_layer_norm": "input_norm",
    "self_attn.out_proj": "attention.dense",
    "fc1": "mlp.up",
    "fc2": "mlp.down",
}
_FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_CROSS = {
    "encoder_attn_layer_norm": "post_attention_norm",
    "encoder_attn.q_proj": "cross_attention.query",
    "encoder_attn.out_proj": "cross_attention.dense",
    "final_layer_norm": "post_cross_attention_norm",
}
_CROSS_FUSED = ("encoder_attn.k_proj", "encoder_attn.v_proj")


def t5_tensors(facts: Mapping[str, Any]) -> dict[str, MappedTensor]:
    """Every tensor of theirs, by its name there, but for copies of tied ones."""
    layers = needed_fact(facts, "model.layers")
    found = {theirs: MappedTensor(ours) for theirs, ours in _ENDS.items()}
    found["final_logits_bias"] = MappedTensor("head.word_bias", leading=1)
    for side, first in (("encoder", 0), ("decoder", layers)):
        is_decoder = side == "decoder"
        parts = _SELF | (_CROSS if is_decoder else {"final_layer_norm": "post_attention_norm"})
        for layer in range(layers):
            theirs = f"model.{side}.layers.{layer}."
            ours = f"blocks.{first + layer}."
            for kind in ("weight", "bias"):
                found |= {
                    f"{theirs}{name}.{kind}": MappedTensor(f"{ours}{own}.{kind}")
                    for name, own in parts.items()
                }
                for part, name in enumerate(_FUSED):
                    fused = MappedTensor(f"{ours}attention.query_key_value.{kind}", part, 3)
                    found[f"{theirs}{name}.{kind}"] = fused
                for part, name in enumerate(_CROSS_FUSED if is_decoder else ()):
                    fused = MappedTensor(f"{ours}cross_attention.key_value.{kind}", part, 2)
                    found[f"{theirs}{name}.{kind}"] = fused
    return found


def t5_config(facts: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The model's config.json, from its facts under the card's keys. Raises CheckpointError for
    what it cannot say.
    """
    hidden, heads = (
        needed_fact(facts, "model.hidden_size"),
        needed_fact(facts, "model.attention_heads"),
    )
    fixed = {"model.kv_channels": hidden // heads, "model.layernorm_epsilon": LAYERNORM_EPSILON}
    only(facts, fixed, "Blenderbot")
    layers = needed_fact(facts, "model.layers")
    ffn = needed_fact(facts, "model.ffn_hidden_size")
    sides = ("encoder", "decoder")
    return {
        "architectures": ["BlenderbotForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        "vocab_size": needed_fact(facts, ROWS_KEY),
        "d_model": hidden,
        **{f"{side}_layers": layers for side in sides},
        **{f"{side}_attention_heads": heads for side in sides},
        **{f"{side}_ffn_dim": ffn for side in sides},
        **{f"{side}_layerdrop": 0.0 for side in sides},
        "activation_function": ACTIVATIONS[needed_fact(facts, "model.activation")],
        "max_position_embeddings": needed_fact(facts, "model.max_position_embeddings"),
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "init_std": 0.02,
        "scale_embedding": False,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        # Named even when unknown: a reader would otherwise take the ids of Blenderbot's own
        # vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "forced_eos_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,  # the same, for transformers < 4.56
    }


T5 = Architecture(
    "Blenderbot",
    (MODEL_TYPE,),
    t5_tensors,
    t5_config,
    std="init_std",
    remarks=(
        "decoder_start_token_id is not in the checkpoint: to generate text, set it to the id of [BOS]",
    ),
)

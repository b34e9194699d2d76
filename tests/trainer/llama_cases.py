"""Tiny models of today's kind for the tests of the trainer: Llama's and Qwen3's."""

from __future__ import annotations

from typing import Any

from tests.trainer.cases import tiny
from trainer.config.card import TrainerConfig

LLAMA: dict[str, Any] = {
    "embedding_layernorm": False,
    "position_embedding": "rotary",
    "rotary_base": 500_000.0,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "ffn_hidden_size": 88,
    "linear_biases": False,
    "key_value_heads": 2,
    "tied_embeddings": False,
}
QWEN: dict[str, Any] = LLAMA | {
    "qk_norm": True,
    "kv_channels": 12,
    "tied_embeddings": True,
    "layernorm_epsilon": 1e-6,
}
STRETCHED: dict[str, Any] = LLAMA | {
    "rotary_base": 100.0,
    "rotary_factor": 8.0,
    "rotary_original_length": 32,
}
KINDS: dict[str, dict[str, Any]] = {"llama": LLAMA, "llama31": STRETCHED, "qwen3": QWEN}


def tiny_llama(
    pipeline: int = 1, tensor: int = 1, dtype: str = "fp32", kind: str = "llama", **model: Any
) -> TrainerConfig:
    """`tiny` as a Llama: 2 layers, 32 wide, 4 heads on 2 of keys and values; as a Llama 3.1, with
    stretched positions (of its four waves one stays, two are stretched, one lies between); or as a
    Qwen3, with wider heads.
    """
    return tiny(pipeline, tensor, dtype, **KINDS[kind] | model)

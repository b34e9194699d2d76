"""Sizes and costs of models of today's kind: parameters as `transformers` counts those of published
ones.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.llama_cases import KINDS, LLAMA, tiny_llama
from tests.trainer.schedule_cards import card_of
from trainer.checkpoint.huggingface.llama import facts_of_config, llama_config
from trainer.config.model import ModelSection
from trainer.schedule import flops
from trainer.schedule.rules import cross_problems

# As their config.json on the hub says; positions add no parameters. The last number is the one that
# the model cards say.
SHARED: dict[str, Any] = {"hidden_act": "silu"}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7B": (
        {
            "model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        6_738_415_616,
    ),
    "Llama-3-8B": (
        {
            "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "rope_theta": 500_000.0,
        },
        8_030_261_248,
    ),
    "Llama-3.2-1B, without its stretched positions": (
        {
            "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "head_dim": 64, "tie_word_embeddings": True, "rope_theta": 500_000.0,
        },
        1_235_814_400,
    ),
    "Llama-3-70B": (
        {
            "model_type": "llama", "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672,
            "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "rope_theta": 500_000.0,
        },
        70_553_706_496,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
            "head_dim": 128, "tie_word_embeddings": True, "rope_theta": 1_000_000.0,
        },
        596_049_920,
    ),
    "Qwen3-8B": (
        {
            "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
            "head_dim": 128, "tie_word_embeddings": False, "rope_theta": 1_000_000.0,
        },
        8_190_735_360,
    ),
}  # fmt: skip


def section(config: dict[str, Any], length: int = 4096, **more: Any) -> ModelSection:
    """The card's section of a published model."""
    facts = facts_of_config(SHARED | config, "config.json")
    values = {
        key.removeprefix("model."): value
        for key, value in facts.items()
        if key.startswith("model.")
    }
    return ModelSection(
        sequence_length=length, attention_dropout=0.0, hidden_dropout=0.0, **values | more
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_model(name: str) -> None:
    """As transformers builds it from the same config, without memory for its weights."""
    config, published = PUBLISHED[name]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHARED | config))
    assert (
        flops.count_parameters(card_of(section(config), config["vocab_size"])).total
        == published
        == theirs.num_parameters()
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_of_a_card_is_the_published_one(name: str) -> None:
    config, _ = PUBLISHED[name]
    facts = facts_of_config(SHARED | config, "config.json")
    written = llama_config(facts, "bfloat16")
    assert {key: written[key] for key in config} == config
    assert facts_of_config(written, "again") == facts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 1), (2, 2)])
def test_stages_hold_all_parameters_between_them(kind: str, pipeline: int, tensor: int) -> None:
    config = tiny_llama(pipeline, tensor, kind=kind)
    count, stages = flops.count_parameters(config), flops.stage_layout(config)
    assert stages is not None
    # norms, which every tensor rank holds whole
    replicated = 2 * (2 * 32 + (24 if kind == "qwen3" else 0)) + 32
    copies = 64 * 32 if kind == "qwen3" and pipeline > 1 else 0  # the tied table's
    assert (
        sum(stage.parameters_per_worker for stage in stages) * tensor
        == count.total + copies + (tensor - 1) * replicated
    )


def test_operations_are_those_of_the_matrices() -> None:
    """Of Llama-3-8B: 2 for each multiply-add of every matrix and token, attention over the full
    window, times three.
    """
    config, published = PUBLISHED["Llama-3-8B"]
    card = card_of(section(config, length=8192), 128_256)
    vectors = (2 * 32 + 1) * 4096
    matrices = published - vectors - 128_256 * 4096  # the word embedding multiplies nothing
    scores = 2 * 2 * 32 * 8192 * 4096
    assert flops.model_flops(card, 1) == 3 * 8192 * (2 * matrices + scores)
    rate = flops.tflops_per_gpu(card, 64, 10.0, 8)
    assert math.isclose(rate, 64 * flops.hardware_flops(card, 1) / 80e12)
    assert flops.count_parameters(card).without_embeddings == published - 2 * 128_256 * 4096


# -------------------------------------------------------------------------- what a card may not say
@pytest.mark.parametrize(
    ("tensor", "model", "key", "words"),
    [
        (
            1,
            {"key_value_heads": 3},
            "model.key_value_heads",
            "must divide model.attention_heads (4)",
        ),
        (
            1,
            {"key_value_heads": 8},
            "model.key_value_heads",
            "must divide model.attention_heads (4)",
        ),
        (
            4,
            {},
            "parallel.tensor",
            "must divide model.key_value_heads (2): each tensor rank has whole ones",
        ),
        (
            1,
            {"linear_biases": True},
            "model.linear_biases",
            'not possible with model.activation = "swiglu"',
        ),
        (1, {"kv_channels": 5}, "model.kv_channels", "must be even with rotary positions"),
        (
            1,
            {"max_position_embeddings": 64},
            "model.max_position_embeddings",
            "has no meaning with rotary positions",
        ),
        (1, {"rotary_factor": 8.0}, "model.rotary_factor", "needs model.rotary_original_length"),
        (
            1,
            {"rotary_original_length": 8192},
            "model.rotary_original_length",
            "no meaning without model.rotary_factor",
        ),
        (
            1,
            {"rotary_high_factor": 1.0},
            "model.rotary_high_factor",
            "must be above model.rotary_low_factor (1)",
        ),
        (
            1,
            {"rotary_factor": 8.0, "position_embedding": "alibi"},
            "model.rotary_factor",
            'no meaning with model.position_embedding = "alibi"',
        ),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_one_line(
    tensor: int, model: dict[str, Any], key: str, words: str
) -> None:
    found = cross_problems(tiny_llama(1, tensor, **model), tensor)
    assert [problem.key for problem in found] == [key]
    assert words in str(found[0]) and "\n" not in str(found[0])


@pytest.mark.parametrize("family", ["bert", "t5", "gpt"])
@pytest.mark.parametrize(
    "key", ["norm", "activation", "key_value_heads", "qk_norm", "linear_biases", "tied_embeddings"]
)
def test_other_families_and_the_original_layout_have_none_of_it(family: str, key: str) -> None:
    value = (LLAMA | {"qk_norm": True})[key]
    config = tiny_llama(
        family=family,
        position_embedding="absolute",
        embedding_layernorm=False,
        **_usual(key, value),
    )
    if family == "gpt":
        config = config.model_copy(
            update={"checkpoint": config.checkpoint.model_copy(update={"format": "deepspeed"})}
        )
    found = [problem for problem in cross_problems(config, 1) if problem.key == f"model.{key}"]
    assert len(found) == 1
    assert ("deepspeed" if family == "gpt" else f'model.family = "{family}"') in str(found[0])


def _usual(key: str, value: Any) -> dict[str, Any]:
    usual = {
        "norm": "layernorm", "activation": "gelu", "key_value_heads": None, "qk_norm": False, "linear_biases": True,
        "tied_embeddings": True, "rotary_base": 10_000.0,
    }  # fmt: skip
    return usual | {key: value}

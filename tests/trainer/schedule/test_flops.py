"""Sizes and costs against the figures of the 176B training, and of models of today: parameters as
`transformers` counts those of published ones.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.llama_cases import KINDS, LLAMA, tiny_llama
from tests.trainer.schedule_cards import card_of
from trainer.checkpoint.huggingface.llama import facts_of_config, llama_config
from trainer.config.card import ModelSection, OptimizerSection, ParallelSection, PrecisionSection
from trainer.metrics.throughput import utilization
from trainer.schedule import flops
from trainer.schedule.devices import device_peak, peak_tflops
from trainer.schedule.rules import cross_problems

BLOOM = ModelSection(
    layers=70,
    hidden_size=14336,
    attention_heads=112,
    sequence_length=2048,
    embedding_layernorm=True,
    activation_checkpointing=True,
)
VOCABULARY = 250_880
CARD = card_of(BLOOM, VOCABULARY)
FP32 = card_of(BLOOM, VOCABULARY, precision=PrecisionSection(dtype="fp32"))
FP16 = card_of(BLOOM, VOCABULARY, precision=PrecisionSection(dtype="fp16"))
CODED = card_of(BLOOM, VOCABULARY, optimizer=OptimizerSection(type="adam8bit"))


def test_parameters_of_176b() -> None:
    count = flops.count_parameters(CARD)
    assert count.total == 176_247_271_424
    assert count.block == 2_466_437_120
    assert count.word_embedding == 3_596_615_680
    assert count.position_embedding == 0


@given(
    layers=st.integers(1, 100),
    heads=st.integers(1, 64),
    size=st.integers(1, 128),
    length=st.integers(1, 4096),
)
def test_parameters_of_a_gpt(layers: int, heads: int, size: int, length: int) -> None:
    hidden = heads * size
    model = ModelSection(
        layers=layers,
        hidden_size=hidden,
        attention_heads=heads,
        sequence_length=length,
        position_embedding="absolute",
    )
    expected = (
        layers * (12 * hidden**2 + 13 * hidden) + 1000 * hidden + length * hidden + 2 * hidden
    )
    assert flops.count_parameters(card_of(model, 1000)).total == expected


@pytest.mark.parametrize(
    ("batch", "seconds", "world", "expected"),
    [
        (2048, 105.22, 384, 149.02),
        (2048, 104.70, 384, 149.76),
        (16, 15.23, 384, 8.04),
        (2048, 215.82, 192, 145.31),
    ],
)
def test_tflops_of_the_original_log(
    batch: int, seconds: float, world: int, expected: float
) -> None:
    assert round(flops.tflops_per_gpu(CARD, batch, seconds, world), 2) == expected


def test_hardware_flops_follow_the_formula_under_checkpointing() -> None:
    operations = flops.hardware_flops(CARD, 2048)
    assert math.isclose(operations / 1e12, flops.tflops_per_gpu(CARD, 2048, 1.0, 1), rel_tol=1e-12)


def test_model_flops_are_six_per_parameter_and_token() -> None:
    tokens = 2048 * BLOOM.sequence_length
    count = flops.count_parameters(CARD)
    matrices = 6 * tokens * (70 * 12 * 14336**2 + count.word_embedding)
    attention = 12 * 70 * 14336 * 2048 * tokens
    assert flops.model_flops(CARD, 2048) == matrices + attention


def test_the_counter_of_the_tensorboard_axis() -> None:
    count = flops.count_parameters(CARD)
    assert flops.counted_gigaflops(CARD, 2048) == 6 * 2048 * 2048 * count.without_embeddings / 1e9


def test_utilization_of_the_176b_training() -> None:
    """105.22 s a step on A100s was 48 % of their peak with what was recomputed, 36 % without."""
    peak = peak_tflops("NVIDIA A100-SXM4-80GB", "bf16")
    found = utilization(CARD, 2048, 105.22, 384, peak)
    assert found.hardware_tflops == pytest.approx(149.02, abs=0.005)
    assert found.hfu == pytest.approx(0.478, abs=5e-4)
    assert found.mfu == pytest.approx(0.360, abs=5e-4)
    unknown = utilization(CARD, 2048, 105.22, 384, None)
    assert (unknown.mfu, unknown.hfu) == (None, None)
    assert unknown.model_tflops == found.model_tflops


def test_shorter_samples_cost_less_than_their_share_of_tokens() -> None:
    whole, half = (flops.model_flops(CARD, 8, length) for length in (2048, 1024))
    assert whole == flops.model_flops(CARD, 8)
    attention = 12 * 70 * 14336 * 1024 * 1024 * 8
    assert whole == 2 * half + 2 * attention
    short = card_of(BLOOM.model_copy(update={"sequence_length": 1024}), VOCABULARY)
    for count in (flops.model_flops, flops.hardware_flops):
        assert count(CARD, 8, 1024) == count(short, 8)
    assert flops.tflops_per_gpu(CARD, 8, 1.0, 1, 1024) == flops.tflops_per_gpu(short, 8, 1.0, 1)


def test_heads_of_another_width_than_the_stream() -> None:
    """Checked against the shapes of the matrices themselves."""
    model = ModelSection(
        layers=3, hidden_size=64, attention_heads=4, kv_channels=24, sequence_length=16
    )
    wide = 4 * 24
    shapes = [
        (3 * wide, 64),
        (3 * wide,),
        (64, wide),
        (64,),
        (256, 64),
        (256,),
        (64, 256),
        (64,),
        *[(64,)] * 4,
    ]
    card = card_of(model, 100)
    assert flops.count_parameters(card).block == sum(math.prod(shape) for shape in shapes)
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    scores = 2 * 2 * 16 * wide
    assert flops.model_flops(card, 1) == 3 * 16 * (3 * (2 * matrices + scores) + 2 * 64 * 100)


@pytest.mark.parametrize("position", ["alibi", "rotary"])
def test_positions_without_a_table(position: str) -> None:
    model = BLOOM.model_copy(update={"position_embedding": position})
    assert flops.count_parameters(card_of(model, VOCABULARY)).position_embedding == 0


def test_no_checkpointing_recomputes_nothing() -> None:
    plain = card_of(BLOOM.model_copy(update={"activation_checkpointing": False}))
    assert flops.hardware_flops(plain, 8) == flops.model_flops(plain, 8)


def test_bytes() -> None:
    gibibyte = 2**30
    assert round(flops.checkpoint_bytes(CARD, 176 * 10**9) / gibibyte, 1) == 2294.8
    assert round(flops.weight_bytes(CARD, 176 * 10**9) / gibibyte, 1) == 327.8
    assert flops.training_bytes(CARD, 10, 3) == 180
    assert flops.weight_bytes(FP32, 10) == 40
    assert flops.worker_state_bytes(CARD, 1000, 8, 500) == 6000 + 1500
    assert flops.training_bytes(FP16, 10, 0) == 180
    assert flops.moment_bytes(CODED, 2560, 0) == 2 * (2560 + 10 * 4)
    assert flops.moment_bytes(CODED, 2560 + 100, 100) == 2 * (2560 + 10 * 4) + 800
    assert flops.training_bytes(CODED, 2560, 0) == 2560 * (2 + 4 + 4) + 5200
    assert flops.worker_state_bytes(CODED, 2560, 8, 0) == 6 * 2560 + (4 * 2560 + 5200) // 8


def test_files_of_the_deepspeed_layout() -> None:
    files = flops.deepspeed_checkpoint_files(70, 4, 12, 8)
    assert (files.layer, files.model, files.optimizer, files.total) == (288, 48, 384, 720)
    assert flops.deepspeed_checkpoint_files(70, 4, 12, 4).total == 528


def test_stages_of_176b() -> None:
    parallel = ParallelSection(tensor=4, pipeline=12)
    stages = flops.stage_layout(card_of(BLOOM, VOCABULARY, parallel=parallel))
    assert stages is not None
    assert [stage.blocks for stage in stages] == [5, *[6] * 10, 5]
    assert [stage.first_block for stage in stages][:3] == [0, 5, 11]
    assert stages[0].embedding and stages[-1].head and not stages[5].embedding


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_stage_parameters_add_up(stages: int) -> None:
    model = ModelSection(
        layers=4, hidden_size=8, attention_heads=2, sequence_length=16, embedding_layernorm=True
    )
    card = card_of(model, parallel=ParallelSection(pipeline=stages))
    layout = flops.stage_layout(card)
    assert layout is not None
    tied_copy = 64 * 8 if stages > 1 else 0
    assert (
        sum(stage.parameters_per_worker for stage in layout)
        == flops.count_parameters(card).total + tied_copy
    )


def test_partition_by_blocks_alone_and_unknown_partitions() -> None:
    model = BLOOM.model_copy(update={"layers": 24})

    def layout(partition: str) -> tuple[flops.StageBlocks, ...] | None:
        parallel = ParallelSection(pipeline=4, partition=partition)
        return flops.stage_layout(card_of(model, VOCABULARY, parallel=parallel))

    assert [stage.blocks for stage in layout("type:transformer") or ()] == [6, 6, 6, 6]
    # the second counts LayerNorms, the third no block, the last 26 layers
    for unknown in ("parameters", "type:layer", "type:embedding", "type:Transformer|EMBED"):
        assert layout(unknown) is None


def test_bubble() -> None:
    assert flops.bubble_share(1, 1) == 0
    assert flops.bubble_share(128, 12) == pytest.approx(11 / 139)
    assert flops.bubble_share(128, 12, 2) == pytest.approx(11 / 267)
    # the two that lack for a round are waited for
    assert flops.bubble_share(10, 12, 2) == pytest.approx(13 / 33)


@pytest.mark.parametrize(
    ("device", "bf16", "fp16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0, 312.0, 19.5),
        ("NVIDIA A100 80GB PCIe", 312.0, 312.0, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756.0, 756.0, 51.2),
        ("NVIDIA H100 NVL", 835.5, 835.5, 60.0),
        ("NVIDIA H200", 989.4, 989.4, 66.9),
        ("NVIDIA GH200 480GB", 989.4, 989.4, 66.9),
        ("NVIDIA H20", 148.0, 148.0, 44.0),
        ("NVIDIA B200", 2250.0, 2250.0, 75.0),
        ("NVIDIA GB200", 2500.0, 2500.0, 80.0),
        ("Tesla V100-SXM2-32GB", None, 125.0, 15.7),
        ("Tesla V100-PCIE-16GB", None, 112.0, 14.0),
        ("Tesla T4", None, 65.0, 8.1),
        ("NVIDIA A10", 125.0, 125.0, 31.2),
        ("NVIDIA L4", 121.0, 121.0, 30.3),
        ("NVIDIA L40S", 362.0, 362.0, 91.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6),
        ("AMD Instinct MI250X", 191.5, 191.5, 47.9),
        ("AMD Instinct MI300X", 1307.4, 1307.4, 163.4),
    ],
)
def test_peaks_by_the_names_that_drivers_give(
    device: str, bf16: float | None, fp16: float, fp32: float
) -> None:
    assert [peak_tflops(device, dtype) for dtype in ("bf16", "fp16", "fp32")] == [bf16, fp16, fp32]


@pytest.mark.parametrize(
    "device",
    ["cpu", "", "Intel(R) Xeon(R) Platinum 8480", "NVIDIA A10G", "NVIDIA RTX A4000", "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
     "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H2000"],
)  # fmt: skip
def test_unknown_devices_have_no_peak(device: str) -> None:
    assert device_peak(device) is None
    assert peak_tflops(device, "bf16") is None


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

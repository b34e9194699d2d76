"""Sizes and costs against the figures of the 176B training."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.schedule_cards import card_of
from trainer.config.card import ModelSection, OptimizerSection, ParallelSection, PrecisionSection
from trainer.metrics.throughput import utilization
from trainer.schedule import flops
from trainer.schedule.devices import device_peak, peak_tflops

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

"""Sizes and costs against the figures of the 176B training."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ModelSection, ParallelSection, PrecisionSection
from trainer.model import flops

BLOOM = ModelSection(
    layers=70,
    hidden_size=14336,
    attention_heads=112,
    sequence_length=2048,
    embedding_layernorm=True,
    activation_checkpointing=True,
)
VOCABULARY = 250_880
BF16, FP32 = PrecisionSection(), PrecisionSection(dtype="fp32")


def test_parameters_of_176b() -> None:
    count = flops.count_parameters(BLOOM, VOCABULARY)
    assert count.total == 176_247_271_424
    assert count.block == 2_466_437_120
    assert count.word_embedding == 3_596_615_680
    assert count.position_embedding == 0


@given(layers=st.integers(1, 100), heads=st.integers(1, 64), size=st.integers(1, 128), length=st.integers(1, 4096))
def test_parameters_of_a_gpt(layers: int, heads: int, size: int, length: int) -> None:
    hidden = heads * size
    model = ModelSection(
        layers=layers, hidden_size=hidden, attention_heads=heads, sequence_length=length, position_embedding="absolute"
    )
    expected = layers * (12 * hidden**2 + 13 * hidden) + 1000 * hidden + length * hidden + 2 * hidden
    assert flops.count_parameters(model, 1000).total == expected


@pytest.mark.parametrize(
    ("batch", "seconds", "world", "expected"),
    [(2048, 105.22, 384, 149.02), (2048, 104.70, 384, 149.76), (16, 15.23, 384, 8.04), (2048, 215.82, 192, 145.31)],
)
def test_tflops_of_the_original_log(batch: int, seconds: float, world: int, expected: float) -> None:
    assert round(flops.tflops_per_gpu(BLOOM, VOCABULARY, batch, seconds, world), 2) == expected


def test_hardware_flops_are_the_original_formula_under_checkpointing() -> None:
    operations = flops.hardware_flops(BLOOM, VOCABULARY, 2048)
    assert math.isclose(operations / 1e12, flops.tflops_per_gpu(BLOOM, VOCABULARY, 2048, 1.0, 1), rel_tol=1e-12)


def test_model_flops_are_six_per_parameter_and_token_plus_attention() -> None:
    tokens = 2048 * BLOOM.sequence_length
    count = flops.count_parameters(BLOOM, VOCABULARY)
    matrices = 6 * tokens * (70 * 12 * 14336**2 + count.word_embedding)
    attention = 12 * 70 * 14336 * 2048 * tokens
    assert flops.model_flops(BLOOM, VOCABULARY, 2048) == matrices + attention


def test_no_checkpointing_recomputes_nothing() -> None:
    plain = BLOOM.model_copy(update={"activation_checkpointing": False})
    assert flops.hardware_flops(plain, VOCABULARY, 8) == flops.model_flops(plain, VOCABULARY, 8)


def test_bytes() -> None:
    gibibyte = 2**30
    assert round(flops.checkpoint_bytes(176 * 10**9, BF16) / gibibyte, 1) == 2294.8
    assert round(flops.weight_bytes(176 * 10**9, BF16) / gibibyte, 1) == 327.8
    assert flops.training_bytes(10, BF16) == 180
    assert flops.weight_bytes(10, FP32) == 40
    assert flops.worker_state_bytes(1000, BF16, 8) == 6000 + 1500


def test_files_of_the_deepspeed_layout() -> None:
    files = flops.deepspeed_checkpoint_files(70, 4, 12, 8)
    assert (files.layer, files.model, files.optimizer, files.total) == (288, 48, 384, 720)
    assert flops.deepspeed_checkpoint_files(70, 4, 12, 4).total == 528


def test_stages_of_176b() -> None:
    stages = flops.stage_layout(BLOOM, ParallelSection(tensor=4, pipeline=12), VOCABULARY)
    assert stages is not None
    assert [stage.blocks for stage in stages] == [5, *[6] * 10, 5]
    assert [stage.first_block for stage in stages][:3] == [0, 5, 11]
    assert stages[0].embedding and stages[-1].head and not stages[5].embedding


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_stage_parameters_add_up(stages: int) -> None:
    model = ModelSection(layers=4, hidden_size=8, attention_heads=2, sequence_length=16, embedding_layernorm=True)
    layout = flops.stage_layout(model, ParallelSection(pipeline=stages), 64)
    assert layout is not None
    tied_copy = 64 * 8 if stages > 1 else 0
    assert sum(stage.parameters_per_worker for stage in layout) == flops.count_parameters(model, 64).total + tied_copy


def test_partition_by_blocks_alone_and_unknown_partitions() -> None:
    model = BLOOM.model_copy(update={"layers": 24})
    layout = flops.stage_layout(model, ParallelSection(pipeline=4, partition="type:transformer"), VOCABULARY)
    assert layout is not None and [stage.blocks for stage in layout] == [6, 6, 6, 6]
    assert flops.stage_layout(model, ParallelSection(pipeline=4, partition="parameters"), VOCABULARY) is None


def test_bubble() -> None:
    assert flops.bubble_share(1, 1) == 0
    assert flops.bubble_share(128, 12) == pytest.approx(11 / 139)

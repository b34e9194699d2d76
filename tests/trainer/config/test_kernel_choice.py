"""The attention kernel of each card on each device, and that torch may take no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from tests.trainer.cases import tiny
from tests.trainer.schedule_cards import card_of
from tests.trainer.t5_cases import tiny_t5
from tr11ops.runcard.card import RunCard, load_card, shipped_cards, shipped_folder
from tr11ops.runcard.check import Level
from tr11ops.runcard.gpu_memory import attention_checks, attention_of, gpu_is_unknown
from trainer.config.card import CardError, ModelSection, TrainerConfig
from trainer.config.kernel_choice import (
    Device,
    choose_kernel,
    recomputed_between,
    recomputed_blocks,
    recomputed_part,
)
from trainer.model.documents import DocumentRules
from trainer.model.kernels import (
    CausalKernel,
    DenseKernel,
    FlexKernel,
    PaddedKernel,
    build_causal_kernel,
    build_kernel,
    drops_by_place,
)
from trainer.parallel.mesh import Mesh
from trainer.schedule import flops
from trainer.schedule.rules import cross_problems

CPU_, V100, A100, H100 = (
    Device("cpu"),
    Device("cuda", (7, 0)),
    Device("cuda", (8, 0)),
    Device("cuda", (9, 0)),
)
MI300 = Device("cuda", (9, 4), maker="amd")
NO_TRITON = Device("cuda", (8, 0), has_triton=False)
GPU_MESH = Mesh(1, 1, 1, 0, torch.device("cuda", 0))
RULES = DocumentRules(0, True, True)


def chosen(
    device: Device, dtype: str = "bf16", resets: bool = False, **model: Any
) -> tuple[str, str]:
    """Name and reason for a model with heads of 64."""
    found = choose_kernel(tiny(hidden_size=256, **model).model, resets, dtype, device)
    assert found.refusal is None
    return found.name, found.why


@pytest.mark.parametrize(
    ("device", "options", "name", "why"),
    [
        (A100, {}, "flex", ""),
        (H100, {"dtype": "fp32"}, "flex", ""),
        (A100, {"attention_dropout": 0.1}, "flex", ""),
        (A100, {"attention_dropout": 0.1, "dtype": "fp32"}, "flex", ""),
        (NO_TRITON, {}, "efficient", "triton"),
        (V100, {"dtype": "fp16"}, "efficient", "capability 8.0, this is 7.0"),
        (V100, {"dtype": "bf16"}, "math", "needs compute capability 8.0 for bf16, this is 7.0"),
        (A100, {"kv_channels": 8}, "efficient", "heads of 16 or more, the head size is 8"),
        (A100, {"kv_channels": 12}, "math", "multiple of 8, the head size is 12"),
        (A100, {"kv_channels": 12, "dtype": "fp32"}, "efficient", "heads of 16 or more"),
        (A100, {"position_embedding": "rotary"}, "causal", ""),
        (A100, {"position_embedding": "rotary", "attention_dropout": 0.1}, "flex", ""),
        (NO_TRITON, {"position_embedding": "rotary", "attention_dropout": 0.1}, "causal", ""),
        (H100, {"position_embedding": "rotary"}, "cudnn", ""),
        (H100, {"position_embedding": "absolute", "dtype": "fp16"}, "cudnn", ""),
        (H100, {"position_embedding": "rotary", "dtype": "fp32"}, "causal", ""),
        (H100, {"position_embedding": "rotary", "attention_dropout": 0.1}, "flex", ""),
        (
            V100,
            {"position_embedding": "rotary", "attention_dropout": 0.1, "dtype": "fp16"},
            "causal",
            "",
        ),
        (H100, {"position_embedding": "rotary", "kv_channels": 256}, "causal", ""),
        (H100, {"position_embedding": "rotary", "kv_channels": 60}, "causal", ""),
        (MI300, {"position_embedding": "rotary"}, "causal", ""),
        (A100, {"position_embedding": "rotary", "resets": True}, "flex", ""),
        (
            A100,
            {"position_embedding": "rotary", "resets": True, "attention_dropout": 0.1},
            "flex",
            "",
        ),
        (A100, {"position_embedding": "rotary", "kv_channels": 300, "dtype": "fp32"}, "causal", ""),
        (
            A100,
            {"position_embedding": "rotary", "kv_channels": 300},
            "math",
            "heads of 256 or less",
        ),
        (CPU_, {}, "dense", ""),
        (CPU_, {"position_embedding": "absolute"}, "causal", ""),
        (CPU_, {"attention_dropout": 0.1}, "math", "on CPUs no fused kernel knows dropout"),
    ],
)
def test_the_table(device: Device, options: dict[str, Any], name: str, why: str) -> None:
    found, reason = chosen(device, **options)
    assert found == name and why in reason and bool(reason) == bool(why)


def shipped(name: str, *overrides: str) -> RunCard:
    return load_card(shipped_folder() / f"{name}.toml", overrides, {}, keep_undefined=True)


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("tr11-176B-ml", "flex"),
        ("tr11-176B-ml-24n", "flex"),
        ("setup-test-n2", "flex"),
        ("rehearsal", "efficient"),
        ("demo", "dense"),
        ("bert-4l", "efficient"),  # its heads are of 8
        ("bert-12l", "flex"),
        ("bert-large", "flex"),
        ("bert-1b", "flex"),
        ("t5-small", "flex"),
        ("chronicle-bnb", "dense"),
        ("chronicle-cl", "dense"),
        ("chronicle-embnorm", "dense"),
    ],
)
def test_each_shipped_card(card: str, name: str) -> None:
    """All that ask for a fused kernel get one, where they are launched and on their nodes."""
    assert set(shipped_cards()) == {
        "tr11-176B-ml", "tr11-176B-ml-24n", "setup-test-n2", "rehearsal", "demo", "bert-4l", "bert-12l",
        "bert-large", "bert-1b", "t5-small", "chronicle-bnb", "chronicle-cl", "chronicle-embnorm",
    }  # fmt: skip
    loaded = shipped(card)
    choice = attention_of(loaded)
    assert (choice.name, choice.refusal) == (name, None)
    told = Level.WARNING if gpu_is_unknown(loaded) else Level.OK  # a rehearsal is of no kind of GPU
    assert [check.level for check in attention_checks(loaded)] == [told] * (
        loaded.slurm.gpus_per_node > 0
    )


def test_what_a_node_would_refuse_is_refused_at_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rule on both sides: a V100 has no bf16."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 0))
    card = shipped("tr11-176B-ml", "slurm.gpu_kind=V100")
    (check,) = attention_checks(card)
    assert (
        check.level is Level.REFUSED
        and check.exit_code == 2
        and check.name == "model.require_fused_attention"
    )
    with pytest.raises(CardError) as caught:
        build_kernel(card.model, GPU_MESH, None, card.precision.dtype)
    assert check.text in str(caught.value) and check.fix in str(caught.value)
    dropped = shipped("tr11-176B-ml", "slurm.gpu_kind=V100", "model.require_fused_attention=false")
    assert [
        (check.level, "all scores in memory" in check.text) for check in attention_checks(dropped)
    ] == [(Level.WARNING, True)]


@pytest.mark.parametrize(
    ("capability", "dtype", "options", "documents", "kind", "allowed"),
    [
        ((8, 0), "bf16", {}, None, FlexKernel, None),
        ((8, 0), "bf16", {"attention_dropout": 0.1}, RULES, FlexKernel, None),
        ((7, 0), "fp16", {"attention_dropout": 0.1}, None, DenseKernel, (SDPBackend.EFFICIENT_ATTENTION,)),
        ((7, 0), "fp16", {"attention_dropout": 0.1}, RULES, DenseKernel, (SDPBackend.EFFICIENT_ATTENTION,)),
        ((7, 0), "bf16", {"attention_dropout": 0.1}, None, DenseKernel, (SDPBackend.MATH,)),
        (
            (8, 0), "bf16", {"position_embedding": "rotary"}, None,
            CausalKernel, (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
        ),
        (
            (9, 0), "bf16", {"position_embedding": "rotary"}, None,
            CausalKernel, (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
        ),
        (
            (9, 0), "bf16", {"position_embedding": "rotary", "key_value_heads": 1}, None,
            CausalKernel, (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
        ),
    ],
)  # fmt: skip
def test_kernels_built_for_a_gpu(
    capability: tuple[int, int],
    dtype: str,
    options: dict[str, Any],
    documents: DocumentRules | None,
    kind: type,
    allowed: tuple[SDPBackend, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a mocked GPU; slopes and masks are made on the CPU in place of it."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(
        "trainer.model.kernels.local_alibi_slopes", lambda heads, mesh: torch.ones(heads)
    )
    monkeypatch.setattr("torch.compile", lambda function: function)
    built = build_kernel(tiny(hidden_size=256, **options).model, GPU_MESH, documents, dtype)
    assert type(built) is kind
    if allowed is not None:
        assert built.backends == allowed  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("capability", "dropout", "flexes"), [((8, 0), 0.1, True), ((8, 0), 0.0, False), ((7, 0), 0.1, False)]
)  # fmt: skip
def test_kernels_of_a_t5_built_for_a_gpu(
    capability: tuple[int, int],
    dropout: float,
    flexes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of its encoder and of what looks at it, and of its decoder's own tokens: with dropout those
    whose masks are by place, where there are such.
    """
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("torch.compile", lambda function: function)
    model = tiny_t5(model={"hidden_size": 256, "attention_dropout": dropout}).model
    padded = build_kernel(model, GPU_MESH, None, "fp16")
    own = build_causal_kernel(model, GPU_MESH, "fp16")
    assert isinstance(padded, PaddedKernel) and (padded.flex is not None) == flexes
    assert isinstance(own, FlexKernel if flexes else CausalKernel)
    assert drops_by_place(padded) == drops_by_place(own) == flexes


def test_torch_may_take_no_kernel_but_the_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the memory-efficient kernel computes, torch's math kernel is off; afterwards all is as
    before.
    """
    seen = []
    attend = functional.scaled_dot_product_attention

    def watched(*tensors: Tensor, **options: Any) -> Tensor:
        flags = torch.backends.cuda
        seen.append(
            (flags.mem_efficient_sdp_enabled(), flags.flash_sdp_enabled(), flags.math_sdp_enabled())
        )
        with torch.nn.attention.sdpa_kernel(
            SDPBackend.MATH
        ):  # a CPU has no memory-efficient kernel
            return attend(*tensors, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    heads = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    kernel = DenseKernel(
        torch.ones(2), False, torch.device("cpu"), (SDPBackend.EFFICIENT_ATTENTION,)
    )
    kernel(heads[0], heads[1], heads[2], kernel.mask(heads[0], 8, None), None)
    assert seen == [(True, False, False)] and torch.backends.cuda.math_sdp_enabled()


def test_torch_refuses_where_the_chosen_kernel_is_not_there() -> None:
    kernel = DenseKernel(
        torch.ones(2), False, torch.device("cpu"), (SDPBackend.EFFICIENT_ATTENTION,)
    )
    with pytest.raises(RuntimeError, match="No viable backend"):
        head = torch.randn(1, 2, 8, 4)
        kernel(head, head, head, kernel.mask(head, 8, None), None)


@pytest.mark.parametrize(
    ("dtype", "heights", "bound"),
    [(torch.float32, [80] * 8, 1e-6), (torch.bfloat16, [256, 256, 128], 2e-2)],
)
def test_a_processor_attends_in_strips_of_queries(
    dtype: torch.dtype, heights: list[int], bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None beyond its last query, low in fp32 and high in bf16; together they are the whole
    attention.
    """
    monkeypatch.setattr("trainer.model.matmul._is_native", lambda dtype: True)
    seen = []
    attend = functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        seen.append((query.shape[2], key.shape[2]))
        return attend(query, key, *rest, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    kernel = DenseKernel(torch.tensor([0.1, 0.5]), False, torch.device("cpu"))
    query, key, value = (
        torch.randn(1, 2, 640, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)
    )
    found = kernel(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        kernel.mask(query.to(dtype), 640, None),
        None,
    )
    assert [height for height, _ in seen] == heights
    assert [end for _, end in seen] == [sum(heights[: n + 1]) for n in range(len(heights))]
    whole = attend(query, key, value, attn_mask=kernel.bias(640, torch.float32))
    torch.testing.assert_close(found.float(), whole, atol=bound, rtol=bound)


# ----------------------------------------------------------------------------- recompute choice
# Which blocks are recomputed, and what that costs: pure rules of the card.


def model(layers: int, **keys: object) -> ModelSection:
    return ModelSection.model_validate(
        {"layers": layers, "hidden_size": 64, "attention_heads": 4, "sequence_length": 16} | keys
    )


@given(layers=st.integers(1, 64), blocks=st.integers(1, 64), stages=st.integers(1, 8))
def test_blocks_are_dealt_evenly(layers: int, blocks: int, stages: int) -> None:
    blocks = min(blocks, layers)
    card = model(layers, activation_checkpointing=True, recompute_blocks=blocks)
    chosen = [recomputed_part(card, block) for block in range(layers)]
    assert chosen.count("block") == recomputed_blocks(card) == blocks
    each = layers // stages
    counts = [recomputed_between(card, stage * each, each) for stage in range(stages)]
    assert max(counts) - min(counts) <= 1
    for stage, count in enumerate(counts):
        assert count == chosen[stage * each : (stage + 1) * each].count("block")


def test_none_and_all_are_what_the_switch_alone_says() -> None:
    assert {recomputed_part(model(5), block) for block in range(5)} == {"nothing"}
    assert {
        recomputed_part(model(5, activation_checkpointing=True), block) for block in range(5)
    } == {"block"}
    selective = model(5, activation_checkpointing=True, recompute_granularity="selective")
    assert {recomputed_part(selective, block) for block in range(5)} == {"attention"}


def test_the_operations_are_those_of_what_is_recomputed() -> None:
    plain, whole = model(4), model(4, activation_checkpointing=True)
    some = model(4, activation_checkpointing=True, recompute_blocks=1)
    scores = model(4, activation_checkpointing=True, recompute_granularity="selective")
    base, full, part, inner = (
        flops.hardware_flops(card_of(card, 100), 3) for card in (plain, whole, some, scores)
    )
    assert (full - base) == 4 * (part - base)
    # samples, blocks, operations of 16 x 16 scores of width 64
    assert inner - base == 3 * 4 * 4 * 16 * 16 * 64
    assert [flops.passes(card) for card in (plain, some, whole)] == [3.0, 3.25, 4.0]
    assert 3.0 < flops.passes(scores) < 3.25


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"recompute_blocks": 1}, "model.recompute_blocks"),
        ({"recompute_blocks": 3, "activation_checkpointing": True}, "model.recompute_blocks"),
        ({"recompute_granularity": "selective"}, "model.recompute_granularity"),
        (
            {
                "recompute_granularity": "selective",
                "activation_checkpointing": True,
                "partition_activations": True,
            },
            "model.recompute_granularity",
        ),
    ],
)
def test_contradictions_are_refused(keys: dict[str, object], named: str) -> None:
    value = tiny().model_dump(mode="json")
    value["model"] |= keys
    assert named in {
        problem.key for problem in cross_problems(TrainerConfig.model_validate(value), 1)
    }

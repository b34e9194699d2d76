"""Products in 8-bit floats: how exact they are, what they cost, and where they are refused.

Rounding to e4m3 keeps 4 bits: an element moves by 2^-4 of itself at most, a gradient (e5m2, 3 bits)
by 2^-3. A product sums many such elements whose errors are independent, so its error is smaller
than that share of its own size by the averaging. Losses near ln 64 = 4.2 of the small model may
differ from those in bf16 by CURVE over 20 steps: 1 % of the loss; bf16 itself stays within 0.004 of
fp32 (`test_parity.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from tests.trainer.cases import CPU, tiny, train
from tests.trainer.counting import Counts
from tests.trainer.meta_world import meta_stage
from tests.trainer.schedule_cards import card_of
from tests.trainer.spawn import run_ranks
from tr11ops.runcard.card import RunCard, load_card, shipped_folder
from tr11ops.runcard.check import Level
from tr11ops.runcard.gpu_memory import attention_checks
from trainer.config.card import CardError, TrainerConfig
from trainer.config.kernel_choice import Device, float8_obstacle
from trainer.engine import Engine
from trainer.model import float8
from trainer.model.matmul import linear
from trainer.parallel.mesh import Mesh
from trainer.schedule.devices import _peaks, maker_of
from trainer.schedule.flops import mixed_peak, stage_layout
from trainer.schedule.memory import MemoryShape, stage_memory
from trainer.schedule.rules import cross_problems

CURVE = 0.042
BF16 = torch.bfloat16


def factors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, 7, 64, generator=generator).to(BF16)  # 21 rows: no multiple of 16
    weight = (torch.randn(48, 64, generator=generator) * 0.02).to(BF16)
    gradient = (torch.randn(3, 7, 48, generator=generator) * 1e-5).to(BF16)
    return inputs, weight, gradient


@pytest.mark.parametrize(("dtype", "share"), [(float8.WEIGHTS, 2**-4), (float8.GRADIENTS, 2**-3)])
@pytest.mark.parametrize("size", [1.0, 1e-8, 1e30, 3e38])
def test_rounding_follows_the_tensor(dtype: torch.dtype, share: float, size: float) -> None:
    tensor = (torch.linspace(0.1, 1.0, 64) * size).to(BF16)
    held, scale = float8.rounded(tensor, dtype)
    again = held.double() * scale.double()
    assert float(((again - tensor.double()).abs() / tensor.double()).max()) <= share
    slices = [float8.rounded(part, dtype) for part in tensor.chunk(4)]
    assert torch.equal(torch.cat([part.double() * by.double() for part, by in slices]), again)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [float8.WEIGHTS, float8.GRADIENTS])
def test_what_is_not_finite_stays_so(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(16, 16, dtype=BF16)
    tensor[3, 5] = bad
    held, scale = float8.rounded(tensor, dtype)
    assert not (held.float() * scale).isfinite().any()
    zeros, one = float8.rounded(torch.zeros(16, dtype=BF16), dtype)
    assert not (zeros.float() * one).any()


def test_products_are_those_of_the_rounded_factors() -> None:
    """Within the rounding of the result to bf16, against double precision; and a few per cent from
    bf16's own.
    """
    inputs, weight, gradient = factors()

    def again(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        held, scale = float8.rounded(tensor.reshape(-1, tensor.shape[-1]), dtype)
        return held.double() * scale.double()

    rows, matrix, given = (
        again(inputs, float8.WEIGHTS),
        again(weight, float8.WEIGHTS),
        again(gradient, float8.GRADIENTS),
    )
    own = [value.requires_grad_() for value in (inputs, weight)]
    result = linear(own[0], own[1], None, in_float8=True)
    found = [result, *torch.autograd.grad(result, own, gradient)]
    exact = [rows @ matrix.t(), given @ matrix, given.t() @ rows]
    plain = functional.linear(inputs, weight)
    wide = [plain, *torch.autograd.grad(plain, own, gradient)]
    for one, truth, other in zip(found, exact, wide, strict=True):
        assert one.dtype == BF16
        largest = float(truth.abs().max())
        torch.testing.assert_close(
            one.double().view_as(truth), truth, rtol=2**-8, atol=2**-12 * largest
        )
        apart = float(
            (one.detach().float() - other.detach().float()).norm() / other.detach().float().norm()
        )
        assert 0.005 < apart < 0.1


def test_what_a_layer_costs_of_a_model_of_2_billion_parameters() -> None:
    """8192 tokens, 2048 -> 8192, forward and backward, on meta: three products, their factors read
    as bytes.

    The rounding reads and writes 2.7 GB uncompiled, which takes as long as the products do:
    docs/explanation/kernels.md says so.
    """
    inputs = torch.empty(4, 2048, 2048, dtype=BF16, device="meta", requires_grad=True)
    weight = torch.empty(8192, 2048, dtype=BF16, device="meta", requires_grad=True)
    with Counts() as counts:
        result = linear(inputs, weight, None, in_float8=True)
        result.backward(torch.empty_like(result))
    assert counts.operations["_scaled_mm"] == 3
    assert counts.product_flops == 3 * 2 * 8192 * 2048 * 8192
    assert counts.host_syncs == 0
    assert counts.total_bytes < 2.8e9
    assert inputs.grad is not None and inputs.grad.dtype == BF16


def test_the_estimate_holds_the_rounded_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of wide blocks and few tokens: a weight's gradient is most of what comes and goes, and the 8
    bits beside it.
    """
    wide = {
        "hidden_size": 4096,
        "attention_heads": 32,
        "sequence_length": 64,
        "attention_dropout": 0.1,
    }
    config = in_float8(tiny(dtype="bf16", activation_checkpointing=True, **wide))
    monkeypatch.setattr("trainer.engine.device_facts", lambda device: Device("cuda", (9, 0)))
    with meta_stage(config) as worker:
        peak = worker.counted(2).peak
    shape = MemoryShape(config, 1, "efficient")
    (stage,) = stage_layout(config) or ()
    parts = {part.name: part.bytes for part in stage_memory(shape, stage, 4).parts}
    stated = parts["activations"] + parts["one block's backward pass"]
    assert 1.0 <= stated / peak < 1.25


def test_it_is_traced_whole() -> None:
    inputs, weight, gradient = factors()
    own = [value.requires_grad_() for value in (inputs, weight)]
    torch._dynamo.reset()
    traced = torch.compile(linear, backend="aot_eager", fullgraph=True)(
        own[0], own[1], None, in_float8=True
    )
    plain = linear(own[0], own[1], None, in_float8=True)
    torch._dynamo.reset()
    assert torch.equal(traced, plain)
    both = (torch.autograd.grad(result, own, gradient) for result in (traced, plain))
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


def test_compiled_each_factor_of_two_layers_is_rounded_once() -> None:
    """Forward and backward have six factors a layer, of which the compiler makes three: what was
    rounded forward is kept in 8 bits, and a gradient is rounded for both of its products.
    """
    rounded: dict[str, int] = {}

    def noting(name: str) -> Any:
        def compile_(part: torch.fx.GraphModule, _: Any) -> Any:
            calls = [str(node.target) for node in part.graph.nodes if node.op == "call_function"]
            rounded[name] = sum("linalg_vector_norm" in call for call in calls)
            rounded[f"{name} products"] = sum(".mm." in call for call in calls)
            return make_boxed_func(part)

        return compile_

    def layers(inputs: Tensor, up: Tensor, down: Tensor) -> Tensor:
        inner = functional.gelu(linear(inputs, up, None, in_float8=True))
        return linear(inner, down, None, in_float8=True)

    shapes = ((64, 32), (48, 32), (32, 48))
    given = [torch.randn(shape, dtype=BF16, requires_grad=True) for shape in shapes]
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=noting("forward"),
        bw_compiler=noting("backward"),
        partition_fn=min_cut_rematerialization_partition,  # inductor's
    )
    result = torch.compile(layers, backend=backend, fullgraph=True)(*given)
    result.backward(torch.randn_like(result))
    torch._dynamo.reset()
    assert rounded == {
        "forward": 4,
        "forward products": 2,
        "backward": 2,
        "backward products": 4,
    }


def in_float8(config: TrainerConfig) -> TrainerConfig:
    return config.model_copy(
        update={"precision": config.precision.model_copy(update={"float8": True})}
    )


def test_the_loss_follows_that_in_bf16_on_every_shape() -> None:
    """And tensor ranks, which round their own slices, follow one process more closely than bf16
    does.
    """
    (plain,) = run_ranks(train, 1, tiny(dtype="bf16"))
    (alone,) = run_ranks(train, 1, in_float8(tiny(dtype="bf16")))
    cut = run_ranks(train, 2, in_float8(tiny(1, 2, dtype="bf16")))

    def apart(one: list[float], other: list[float]) -> float:
        return max(abs(left - right) for left, right in zip(one, other, strict=True))

    assert 0.0 < apart(alone.losses, plain.losses) < CURVE
    assert abs(alone.evaluation - plain.evaluation) < CURVE
    assert apart(cut[0].losses, alone.losses) < CURVE
    assert cut[0].losses == cut[1].losses and not any(rank.disagreements for rank in cut)
    assert alone.weights.keys() == plain.weights.keys()  # and a checkpoint has the same tensors
    assert {weight.dtype for weight in alone.weights.values()} == {BF16}


# ----------------------------------------------------------------------------- where it is refused
def test_rules_of_the_card() -> None:
    (problem,) = cross_problems(in_float8(tiny(dtype="fp16")), 1)
    assert str(problem).startswith("precision.float8 = true: is for bf16, not fp16")
    (problem,) = cross_problems(in_float8(tiny(dtype="bf16", ffn_hidden_size=40)), 1)
    assert "needs multiples of 16: model.ffn_hidden_size on a tensor rank is 40" in str(problem)
    assert cross_problems(in_float8(tiny(dtype="bf16")), 1) == []
    (problem,) = cross_problems(in_float8(tiny(1, 4, dtype="bf16")), 4)
    assert "attention's width on a tensor rank is 8" in str(problem)


def test_known_gpus_have_a_rate_where_they_are_allowed() -> None:
    for peak in _peaks():
        device = Device("cuda", peak.capability, maker=maker_of(peak))
        assert (peak.float8 is None) == (float8_obstacle(device) is not None), peak.name


def card(*sets: str) -> RunCard:
    sets = ("precision.float8=true", "model.require_fused_attention=false", *sets)
    return load_card(shipped_folder() / "tr11-176B-ml.toml", sets, {}, keep_undefined=True)


@pytest.mark.parametrize(
    ("kind", "level", "text"),
    [
        ("A100", Level.REFUSED, "needs compute capability 8.9, this is 8.0"),
        ("MI300X", Level.REFUSED, "NVIDIA's formats"),
        ("H100", None, ""),
    ],
)
def test_what_a_node_would_refuse_is_refused_at_launch(
    kind: str, level: Level | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        check
        for check in attention_checks(card(f"slurm.gpu_kind={kind}"))
        if check.name == "precision.float8"
    ]
    assert [(check.level, text in check.text) for check in found] == (
        [(level, True)] if level else []
    )
    if kind == "A100":
        monkeypatch.setattr("trainer.engine.device_facts", lambda device: Device("cuda", (8, 0)))
        with pytest.raises(CardError, match=text):
            Engine.build(in_float8(tiny(dtype="bf16")), Mesh.single(CPU))


def test_the_peak_of_both_kinds_of_operations() -> None:
    wide = tiny(hidden_size=4096, attention_heads=32, layers=32, sequence_length=2048)
    card = card_of(wide.model, 250_880)
    peak = mixed_peak(card, 989.4, 1978.9)
    assert peak is not None and 989.4 < peak < 1978.9
    assert mixed_peak(card, 989.4, 989.4) == pytest.approx(989.4)
    assert mixed_peak(card, None, 1978.9) is None

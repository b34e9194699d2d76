"""Llama and Qwen3: against transformers' own, on every shape, resumed bit for bit.

Bounds are those of test_parity.py: 2e-6 on losses, 1e-5 on gradient norms and on masters; three
steps equal transformers' within 5e-6, as BERT's do.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.cases import FP32_WEIGHT, Curve, assemble, batches, samples, train
from tests.trainer.llama_cases import KINDS, LLAMA, tiny_llama
from tests.trainer.mapped_cases import compare_training
from tests.trainer.one_curve import compare_curves, goes_on, interrupted
from tests.trainer.spawn import run_ranks
from trainer.checkpoint.huggingface.llama import llama_config, llama_tensors
from trainer.config.card import TrainerConfig
from trainer.contract.resumable import model_facts
from trainer.model.layers import root_mean_square_norm

SIZES = (4, 8, 8, 12)
SHAPES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2)]


# ----------------------------------------------------------------------------- shapes
def card(
    shape: tuple[int, int, int], kind: str = "llama", dtype: str = "fp32", **model: Any
) -> TrainerConfig:
    """Sequence parallelism and recomputed blocks on the largest shape alone: the others are
    without.
    """
    pipeline, tensor, data = shape
    config = tiny_llama(pipeline, tensor, dtype, kind, **model)
    if tensor > 1 and data > 1:
        cut = config.parallel.model_copy(update={"sequence_parallel": True})
        recomputed = config.model.model_copy(update={"activation_checkpointing": True})
        config = config.model_copy(update={"parallel": cut, "model": recomputed})
    return config


@cache
def curves(shape: tuple[int, int, int], kind: str) -> list[Curve]:
    pipeline, tensor, data = shape
    return run_ranks(train, pipeline * tensor * data, card(shape, kind), SIZES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_has_one_curve(shape: tuple[int, int, int], kind: str) -> None:
    compare_curves(curves((1, 1, 1), kind), curves(shape, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_stays_within_rounding(kind: str) -> None:
    exact, rounded = (
        curves((1, 1, 1), kind)[0].losses,
        run_ranks(train, 4, card((2, 2, 1), kind, "bf16"), SIZES)[0].losses,
    )
    assert 0 < max(abs(a - b) for a, b in zip(exact, rounded, strict=True)) < 2.0**-9 * 4.2 / 4


@pytest.mark.parametrize(
    "change",
    [
        {"norm": "layernorm"},
        {"activation": "gelu", "linear_biases": True},
        {"activation": "gelu_tanh"},
        {"key_value_heads": 4},
        {"position_embedding": "alibi"},
        {"qk_norm": True, "tied_embeddings": True},
        {"embedding_layernorm": True, "init_method": "xavier"},
    ],
    ids=str,
)
def test_parts_are_chosen_one_by_one(change: dict[str, Any]) -> None:
    """Each makes another model, which has one curve too.

    Where no norm stands behind the embedding its gradients are small, and Adam divides by them:
    1.3e-5 was seen.
    """
    (alone,) = run_ranks(train, 1, card((1, 1, 1), **change), SIZES)
    compare_curves(
        [alone], run_ranks(train, 4, card((2, 2, 1), **change), SIZES), weight_bound=3 * FP32_WEIGHT
    )
    assert alone.losses != curves((1, 1, 1), "llama")[0].losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_goes_on_bit_for_bit(kind: str) -> None:
    """With dropout. Its workers also pass the check for silent corruption, which takes the layers
    one by one.
    """
    config = tiny_llama(kind=kind, hidden_dropout=0.1, attention_dropout=0.1)
    ((went_on, resumed, same, faults),) = run_ranks(interrupted, 1, config, batches)
    assert went_on == resumed and same and not faults
    assert len(set(went_on)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_goes_on_in_another_shape(kind: str) -> None:
    """From whole tensors after four steps of one process: eight ranks go on as one does."""
    tensors = assemble([curves((1, 1, 1), kind)[0].pieces])
    (alone,) = run_ranks(goes_on, 1, card((1, 1, 1), kind), tensors, len(SIZES), batches)
    ranks = run_ranks(goes_on, 8, card((2, 2, 2), kind), tensors, len(SIZES), batches)
    for losses in ranks:
        torch.testing.assert_close(losses, alone, atol=2e-6, rtol=0)


def test_a_z_loss_is_a_part_of_the_loss_on_every_shape() -> None:
    """It is told by itself, the cross-entropy is that of the log, and it holds the sums of
    exponentials down.
    """
    (plain,), (alone,) = (
        curves((1, 1, 1), "llama"),
        run_ranks(train, 1, card((1, 1, 1), z_loss=1e-2), SIZES),
    )
    compare_curves(
        [alone],
        run_ranks(train, 8, card((2, 2, 2), z_loss=1e-2), SIZES),
        weight_bound=3 * FP32_WEIGHT,
    )
    assert [set(parts) for parts in alone.parts] == [{"lm", "z"}] * len(SIZES)
    assert alone.parts[0]["lm"] == pytest.approx(plain.losses[0], abs=2e-6)
    # logits near zero
    assert alone.parts[0]["z"] == pytest.approx(1e-2 * math.log(64) ** 2, rel=0.05)
    assert set(alone.measured) == {"lm", "z"} and alone.losses != plain.losses


# ----------------------------------------------------------------------------- transformers
def theirs(config: TrainerConfig) -> Any:
    torch.manual_seed(3)
    document = llama_config(model_facts(config), "float32")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**document))
    with torch.no_grad():  # norms away from their trivial start
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_transformers(kind: str) -> None:
    """Same weights and samples: loss, three steps of AdamW, and every weight after them."""
    config = tiny_llama(kind=kind, clip=0.0)
    config = config.model_copy(
        update={"batch": config.batch.model_copy(update={"micro_batch_size": 8})}
    )
    model, items = theirs(config), llama_tensors(model_facts(config))
    assert type(model).__name__ == ("Qwen3ForCausalLM" if kind == "qwen3" else "LlamaForCausalLM")
    assert set(model.state_dict()) - set(items) <= {"lm_head.weight"}

    def loss_of(step: int) -> Tensor:
        tokens = samples(config, step, 8)
        return functional.cross_entropy(
            model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()
        )

    compare_training(config, model, items, loss_of, batches)


# ----------------------------------------------------------------------------- pieces
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    """Values and gradients; in bf16 within one rounding of each."""
    generator = torch.Generator().manual_seed(5)
    given = torch.randn(3, 5, 24, generator=generator).to(dtype)
    weight = torch.randn(24, generator=generator).to(dtype)
    factors = torch.randn(3, 5, 24, generator=generator).to(dtype)
    found = []
    for norm in (
        root_mean_square_norm,
        lambda each, scale, epsilon: functional.rms_norm(each, (24,), scale, epsilon),
    ):
        inputs = [each.clone().requires_grad_() for each in (given, weight)]
        result = norm(*inputs, 1e-5)
        found.append([result, *torch.autograd.grad((result * factors).sum(), inputs)])
    bound = 2e-6 if dtype == torch.float32 else 2.0**-7
    for mine, right in zip(*found, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, right, rtol=bound, atol=bound)


def test_the_feed_forward_width_of_a_gate() -> None:
    # those of Llama, 7B and 13B, and smaller ones
    widths = {512: 1536, 768: 2048, 2048: 5632, 4096: 11008, 5120: 13824}
    shape = LLAMA | {"ffn_hidden_size": None}
    for hidden, width in widths.items():
        assert tiny_llama(**shape | {"hidden_size": hidden}).model.ffn == width
    assert tiny_llama(activation="gelu", ffn_hidden_size=None).model.ffn == 4 * 32
    assert tiny_llama().model.ffn == 88

"""T5: against transformers' Blenderbot, which is built alike, on every shape, resumed, and what it
refuses.

Bounds are those of test_parity.py and test_bert.py; with an epsilon of 1e-6, as the cards have, no element's step is
the sign of a rounding. Beside what `transformers` calls T5 nothing can be put: that one
has relative positions, root-mean-square norms and no biases.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import BlenderbotConfig, BlenderbotForConditionalGeneration

from tests.trainer.cases import FP32_LOSS, Curve, assemble, train
from tests.trainer.mapped_cases import compare_training
from tests.trainer.one_curve import compare_curves, goes_on, interrupted
from tests.trainer.spawn import run_ranks
from tests.trainer.t5_cases import DECODER, t5_batches, t5_samples, tiny_t5
from trainer.checkpoint.huggingface.blenderbot import t5_config, t5_tensors
from trainer.config.card import TrainerConfig
from trainer.contract.resumable import model_facts
from trainer.model.documents import IGNORED
from trainer.model.families import FAMILIES
from trainer.schedule import flops
from trainer.schedule.rules import cross_problems

SIZES = (4, 8, 12)
SHAPES = [(2, 1), (1, 2), (8, 1), (4, 2)]
EIGHT = {"attention_heads": 8}
T5 = FAMILIES["t5"]


# ----------------------------------------------------------------------------- shapes
@cache
def curves(shape: tuple[int, int], optimizer: str) -> list[Curve]:
    tensor, data = shape
    config = tiny_t5(tensor, optimizer={"type": optimizer, "epsilon": 1e-6}, model=EIGHT)
    return run_ranks(train, tensor * data, config, SIZES, t5_batches)


@pytest.mark.parametrize(
    ("shape", "optimizer"), [*((shape, "adamw") for shape in SHAPES), ((2, 2), "lamb")], ids=str
)
def test_every_shape_has_one_curve(shape: tuple[int, int], optimizer: str) -> None:
    compare_curves(curves((1, 1), optimizer), curves(shape, optimizer))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1)], ids=str)
def test_parameters_are_counted_as_they_are(shape: tuple[int, int]) -> None:
    config, ranks = tiny_t5(shape[0], model=EIGHT), curves(shape, "adamw")
    whole = assemble([rank.pieces for rank in ranks])
    count = flops.count_parameters(config)
    assert count.total == sum(kinds["weight"].numel() for kinds in whole.values())
    (stage,) = flops.stage_layout(config) or ()
    for rank in ranks:
        assert (
            sum(tensor.numel() for tensor in rank.weights.values()) == stage.parameters_per_worker
        )


def test_operations_are_counted_as_they_are() -> None:
    """Against the count that torch makes of the other library's model, whose linear layers and
    scores are the same.
    """
    from torch.utils.flop_counter import FlopCounterMode

    config = tiny_t5()
    # others' scores are not counted on CPUs
    model, drawn = (theirs(config, "eager"), t5_samples(config, 0, 2))
    with FlopCounterMode(display=False) as counter:
        their_loss(model, drawn)
    assert flops.model_flops(config, 2) == 3 * counter.get_total_flops()


def test_a_resumed_training_goes_on_bit_for_bit() -> None:
    """With dropout, in recomputed blocks. Its workers also pass the check for silent corruption."""
    model = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "activation_checkpointing": True}
    ((went_on, resumed, same, faults),) = run_ranks(
        interrupted, 1, tiny_t5(model=model), t5_batches
    )
    assert went_on == resumed and same and not faults
    assert len(set(went_on)) == 3


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
def test_a_reshaped_training_goes_on(shape: tuple[int, int]) -> None:
    """The state of one rank, on two: losses within the rounding of other sums."""
    whole, first = assemble([curves((1, 1), "adamw")[0].pieces]), len(SIZES)
    (alone,) = run_ranks(
        goes_on, 1, tiny_t5(optimizer={"epsilon": 1e-6}, model=EIGHT), whole, first, t5_batches
    )
    config = tiny_t5(shape[0], optimizer={"epsilon": 1e-6}, model=EIGHT)
    for losses in run_ranks(goes_on, 2, config, whole, first, t5_batches):
        assert losses == pytest.approx(alone, abs=FP32_LOSS, rel=0)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_blocks_change_no_bit(granularity: str) -> None:
    model = {**EIGHT, "activation_checkpointing": True, "recompute_granularity": granularity}
    (found,) = run_ranks(
        train, 1, tiny_t5(model=model, optimizer={"epsilon": 1e-6}), SIZES, t5_batches
    )
    assert found.losses == curves((1, 1), "adamw")[0].losses


# ----------------------------------------------------------------------------- transformers
def theirs(config: TrainerConfig, attention: str = "sdpa") -> Any:
    """Theirs, with one table of positions for both sides, and a bias of words that is trained."""
    torch.manual_seed(3)
    shape = t5_config(model_facts(config), "float32")
    model: Any = BlenderbotForConditionalGeneration(
        BlenderbotConfig(**shape, attn_implementation=attention)
    )
    model.model.decoder.embed_positions.weight = model.model.encoder.embed_positions.weight
    bias = model.final_logits_bias
    del model.final_logits_bias
    model.final_logits_bias = torch.nn.Parameter(bias)
    with torch.no_grad():  # biases and norms away from their trivial start
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def their_loss(model: Any, drawn: dict[str, Tensor]) -> Tensor:
    """Written out, as the loss mask has it."""
    out = model(
        input_ids=drawn["text_enc"],
        attention_mask=drawn["enc_mask"],
        decoder_input_ids=drawn["text_dec"],
        decoder_attention_mask=drawn["dec_mask"],
    )
    each = functional.cross_entropy(
        out.logits.transpose(1, 2), drawn["labels"].clamp(min=0), reduction="none"
    )
    return (each * drawn["loss_mask"]).sum() / drawn["loss_mask"].sum()


def test_training_equals_transformers_blenderbot() -> None:
    """Same weights and samples: encoder, cross attention, decoder, loss, and the gradients of all
    of them.
    """
    batch = {"micro_batch_size": 8, "global_batch_size": 8}
    config = tiny_t5(batch=batch, optimizer={"clip_grad": 0.0, "weight_decay": 0.1})
    model, items = theirs(config), t5_tensors(model_facts(config))
    tied = {f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")} | {
        "lm_head.weight"
    }
    assert set(model.state_dict()) - set(items) <= tied
    compare_training(
        config,
        model,
        items,
        lambda step: their_loss(model, t5_samples(config, step, 8)),
        t5_batches,
    )


# ----------------------------------------------------------------------------- pieces
def test_a_micro_batch_is_both_sides_and_what_counts() -> None:
    config = tiny_t5()
    drawn = t5_samples(config, 1, 4)
    drawn["loss_mask"][0, 1] = 0
    (tokens, marks), labels = T5.prepared(drawn, 16, config)
    assert torch.equal(tokens, torch.cat((drawn["text_enc"], drawn["text_dec"]), 1))
    assert marks.dtype == torch.int32 and torch.equal(marks > 0, tokens != 0)
    assert labels.shape == (4, DECODER) and labels[0, 1] == IGNORED
    assert torch.equal(labels >= 0, drawn["loss_mask"] > 0)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"position_embedding": "alibi"}}, "model.position_embedding"),
        (
            {"model": {"max_position_embeddings": 16, "decoder_sequence_length": 17}},
            "model.max_position_embeddings",
        ),
        ({"parallel": {"pipeline": 2}}, "parallel.pipeline"),
        ({"parallel": {"tensor": 2, "sequence_parallel": True}}, "parallel.sequence_parallel"),
        ({"checkpoint": {"format": "deepspeed"}}, "checkpoint.format"),
    ],
)
def test_what_it_cannot_do_is_refused(sections: dict[str, Any], key: str) -> None:
    problems = cross_problems(tiny_t5(**sections), 2)
    found = [problem for problem in problems if problem.key == key]
    assert found and (
        key == "model.max_position_embeddings" or 'model.family = "t5"' in str(found[0])
    ), problems


def test_a_curriculum_is_refused_and_sequences_stay_whole() -> None:
    value = tiny_t5(2).model_dump(mode="json")
    value["curriculum"] = {"start_length": 8, "total_steps": 10}
    del value["parallel"]["sequence_parallel"]
    card = TrainerConfig.model_validate(value)
    assert [problem.key for problem in cross_problems(card, 2)][:1] == ["curriculum"]
    assert card.parallel.sequence_parallel is False

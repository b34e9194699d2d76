"""BERT: against transformers' own, on every shape, resumed, and where it gathers, pads and refuses.

Bounds are those of test_parity.py: 2e-6 on losses (two units in the last place seen, 9.5e-7), 1e-5
on gradient norms (1.9e-7 seen) and on masters (1.1e-6 seen), but for the key biases, whose true
gradient is zero and which Adam divides by its own size: 1e-4 (1.4e-5 seen).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import MegatronBertConfig, MegatronBertForPreTraining

from tests.trainer.bert_cases import bert_batches, bert_samples, tiny_bert
from tests.trainer.cases import CPU, Curve, assemble, train
from tests.trainer.mapped_cases import compare_training
from tests.trainer.one_curve import compare_curves, interrupted
from tests.trainer.schedule_cards import card_of
from tests.trainer.spawn import run_ranks
from trainer.checkpoint.huggingface.megatron_bert import bert_config, bert_tensors
from trainer.config.card import CardError, TrainerConfig, validate
from trainer.contract.resumable import model_facts
from trainer.engine import Engine, StepResult
from trainer.model import loss
from trainer.model.documents import IGNORED
from trainer.model.families import FAMILIES
from trainer.model.kernels import PaddedKernel
from trainer.parallel.mesh import Mesh
from trainer.schedule import flops
from trainer.schedule.rules import cross_problems

SIZES = (4, 8, 8, 12)
SHAPES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 4, 1), (1, 8, 1), (2, 2, 1), (2, 2, 2)]
BERT = FAMILIES["bert"]


# ----------------------------------------------------------------------------- shapes
def card(shape: tuple[int, int, int]) -> TrainerConfig:
    """Sequence parallelism on the largest shape alone: the others are without."""
    pipeline, tensor, data = shape
    cuts = {"sequence_parallel": tensor > 1 and data > 1}
    return tiny_bert(pipeline, tensor, parallel=cuts, model={"attention_heads": 8})


@cache
def curves(shape: tuple[int, int, int]) -> list[Curve]:
    pipeline, tensor, data = shape
    return run_ranks(train, pipeline * tensor * data, card(shape), SIZES, bert_batches)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_has_one_curve(shape: tuple[int, int, int]) -> None:
    """Of AdamW; of all others see optim/test_every_shape.py."""
    compare_curves(curves((1, 1, 1)), curves(shape))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 1)], ids=str)
def test_parameters_are_counted_as_they_are(shape: tuple[int, int, int]) -> None:
    config, ranks = card(shape), curves(shape)
    whole = assemble([rank.pieces for rank in ranks])
    count = flops.count_parameters(config)
    assert count.total == sum(kinds["weight"].numel() for kinds in whole.values())
    stages = flops.stage_layout(config)
    assert stages is not None
    for index, rank in enumerate(ranks):  # pipeline is the slowest axis
        held = sum(tensor.numel() for tensor in rank.weights.values())
        assert held == stages[index // shape[1]].parameters_per_worker


def test_only_masked_words_have_logits() -> None:
    model = tiny_bert().model
    hidden, length = model.hidden_size, model.sequence_length
    without = 3 * 2 * (hidden**2 * length)  # the words' dense layer

    def operations(rows: int, family: str = "bert", masked: float = 0.15) -> int:
        other = card_of(model.model_copy(update={"family": family}), rows)
        data = other.data.model_copy(update={"mask_probability": masked})
        return flops.model_flops(other.model_copy(update={"data": data}), 1)

    assert operations(10_000) - operations(0) == 3 * 2 * 2 * hidden * 10_000
    assert operations(10_000, masked=0.5) - operations(0, masked=0.5) == 3 * 2 * 8 * hidden * 10_000
    assert operations(0) == operations(0, "gpt") + without


def test_a_resumed_training_goes_on_bit_for_bit() -> None:
    """With dropout. Its workers also pass the check for silent corruption, which takes the layers
    one by one.
    """
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    ((went_on, resumed, same, faults),) = run_ranks(
        interrupted, 1, tiny_bert(model=dropout), bert_batches
    )
    assert went_on == resumed and same and not faults
    assert len(set(went_on)) == 3


def test_it_learns() -> None:
    (curve,) = run_ranks(train, 1, tiny_bert(), (16,) * 30, bert_batches)
    assert abs(curve.losses[0] - 4.85) < 0.1  # ln 64 + ln 2
    assert sum(curve.losses[-4:]) / 4 < 3.3


def test_bf16_stays_within_rounding() -> None:
    """Bounds as in test_parity.py: a rounding of the loss, averaged over the masked words of a
    step.
    """
    pair = [
        run_ranks(train, 2, tiny_bert(1, 2, dtype), SIZES, bert_batches)[0]
        for dtype in ("fp32", "bf16")
    ]
    exact, rounded = (curve.losses for curve in pair)
    assert 0 < max(abs(a - b) for a, b in zip(exact, rounded, strict=True)) < 2.0**-9 * 4.85 * 2


# ----------------------------------------------------------------------------- transformers
def theirs(config: TrainerConfig, dtype: str = "float32") -> Any:
    torch.manual_seed(3)
    model = MegatronBertForPreTraining(
        MegatronBertConfig(**bert_config(model_facts(config), dtype))
    )
    with torch.no_grad():  # biases and norms away from their trivial start
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def their_parts(model: Any, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """Written out: their own takes -100 for labels that do not count, and a mean over them."""
    out = model(drawn["text"], attention_mask=drawn["padding_mask"], token_type_ids=drawn["types"])
    each = functional.cross_entropy(
        out.prediction_logits.transpose(1, 2), drawn["labels"].clamp(min=0), reduction="none"
    )
    mask, words, order = (
        drawn["loss_mask"],
        out.prediction_logits.argmax(-1),
        out.seq_relationship_logits,
    )
    return {
        "lm": (each * mask).sum() / mask.sum(),
        "sop": functional.cross_entropy(order, drawn["is_random"]),
        "lm accuracy": ((words == drawn["labels"]) * mask).sum() / mask.sum(),
        "sop accuracy": (order.argmax(-1) == drawn["is_random"]).float().mean(),
    }


def test_training_equals_transformers_megatron_bert() -> None:
    """Same weights and samples."""
    batch = {"micro_batch_size": 8, "global_batch_size": 8}
    config = tiny_bert(batch=batch, optimizer={"clip_grad": 0.0, "weight_decay": 0.1})
    model, items = theirs(config), bert_tensors(model_facts(config))
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert set(model.state_dict()) - set(items) <= tied
    with torch.no_grad():
        before = {
            name: value.item()
            for name, value in their_parts(model, bert_samples(config, 0, 8)).items()
        }

    def loss_of(step: int) -> Tensor:
        parts = their_parts(model, bert_samples(config, step, 8))
        return parts["lm"] + parts["sop"]

    compare_training(config, model, items, loss_of, bert_batches, before)


# ----------------------------------------------------------------------------- pieces
def prepared(length: int = 16) -> tuple[dict[str, Tensor], Any]:
    config = tiny_bert()
    drawn = bert_samples(config, 1, 4)
    return drawn, BERT.prepared(drawn, length, config)


@pytest.mark.parametrize("length", [16, 8])
def test_masked_words_are_gathered(length: int) -> None:
    drawn, ((text, marks), (places, words, swapped)) = prepared(length)
    cut = drawn["labels"][:, :length]
    assert torch.equal(text, drawn["text"][:, :length]) and text.is_contiguous()
    assert words[words >= 0].tolist() == cut[cut >= 0].tolist()
    assert cut.reshape(-1)[places[words >= 0]].tolist() == words[words >= 0].tolist()
    assert set(words[int((words >= 0).sum()) :].tolist()) <= {IGNORED}
    assert marks.dtype == torch.int32 and swapped is drawn["is_random"]
    expected = torch.where(drawn["padding_mask"] == 0, 0, 1 + drawn["types"])[:, :length]
    assert torch.equal(marks.long(), expected)


def test_the_order_of_sentences_can_be_left_out() -> None:
    """Its head is kept, so that checkpoints have one form, and gets gradients of zero."""
    config = tiny_bert(data={"binary_head": False}, optimizer={"weight_decay": 0.0})
    ((plain, order, start),) = run_ranks(left_out, 1, config)
    assert abs(plain.loss - 4.16) < 0.1  # ln 64 alone
    assert plain.parts == {"lm": plain.loss}
    assert torch.equal(order, start)


def left_out(config: TrainerConfig) -> tuple[StepResult, Tensor, Tensor]:
    """One step, and the weight of the order's head after it and before."""
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    weight = dict(engine.named_parameters())["heads.order.weight"]
    start = weight.detach().clone()
    found = engine.train_step(bert_batches(config, mesh, 0, 8), 8)
    after = weight.detach().clone()
    engine.close()
    return found, after, start


def test_room_for_masked_words_has_few_sizes() -> None:
    config = tiny_bert(model={"sequence_length": 64})
    rooms = [
        BERT.prepared(bert_samples(config, step, 8), 64, config)[1][0].numel() for step in range(20)
    ]
    assert (
        {room % 64 for room in rooms} == {0} and len(set(rooms)) <= 2 and max(rooms) <= 8 * 64 / 4
    )


def test_padding_is_not_attended_to() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, 6, 4, generator=generator) for _ in range(3))
    marks = torch.tensor([[1, 1, 2, 2, 0, 0], [0] * 6], dtype=torch.int32)
    kernel = PaddedKernel()
    mixed = kernel(query, key, value, kernel.mask(query, 6, marks), None)
    scores = query[0] @ key[0, :, :4].transpose(1, 2) / 2
    torch.testing.assert_close(mixed[0], scores.softmax(-1) @ value[0, :, :4])
    assert mixed[1].isfinite().all()  # a sample of nothing but padding


@pytest.mark.parametrize("pieces", [1, 5])
def test_the_projection_adds_a_bias(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients against the plain formula, in one piece and in several."""
    words, size, tokens = 11, 6, 5
    monkeypatch.setitem(loss.PIECE_ELEMENTS, "cpu", words * (tokens // pieces))
    torch.manual_seed(2)
    embedding = torch.nn.Embedding(words, size)
    embedding.first_row = 0  # type: ignore[assignment]
    hidden, bias = (
        torch.randn(tokens, size, requires_grad=True),
        torch.randn(words, requires_grad=True),
    )
    wanted = torch.tensor([3, IGNORED, 0, 10, 7])
    slot = loss.Slot()
    attached = loss.Attach.apply(
        hidden, embedding.weight, slot, bias, torch.zeros(2, requires_grad=True)
    )
    found, _ = loss.projection_loss(attached, embedding, wanted, slot, None, bias.detach())  # type: ignore[arg-type]
    plain = functional.cross_entropy(
        hidden @ embedding.weight.t() + bias, wanted, ignore_index=IGNORED
    )
    torch.testing.assert_close(found, plain)
    inputs = (hidden, embedding.weight, bias)
    for mine, right in zip(
        torch.autograd.grad(found, inputs), torch.autograd.grad(plain, inputs), strict=True
    ):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"position_embedding": "alibi"}}, "model.position_embedding"),
        ({"model": {"embedding_layernorm": True}}, "model.embedding_layernorm"),
        ({"parallel": {"pipeline": 2, "partition": "uniform"}}, "parallel.partition"),
        ({"checkpoint": {"format": "deepspeed"}}, "checkpoint.format"),
    ],
)
def test_what_only_a_gpt_has_is_refused(sections: dict[str, Any], key: str) -> None:
    problems = cross_problems(tiny_bert(**sections), 2)
    assert [problem for problem in problems if problem.key.startswith(key)], problems
    assert 'model.family = "bert"' in str(problems[0])


def test_an_unknown_family_is_refused() -> None:
    value = tiny_bert().model_dump(mode="json")
    value["model"]["family"] = "rnn"
    with pytest.raises(CardError, match="'gpt', 'bert' or 't5'"):
        validate(TrainerConfig, value, "card")

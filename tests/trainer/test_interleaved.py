"""Stages of several parts train as plain 1F1B does: losses, norms, weights, evaluations, and what
is saved.

The bounds are those of test_parity.py: only the order of the sums over micro batches of the tied
weight differs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.trainer.cases import (
    BF16_LOSS,
    CPU,
    FP32_LOSS,
    FP32_NORM,
    FP32_WEIGHT,
    Logical,
    Piece,
    assemble,
    batches,
    copy_state,
    fill,
    tiny,
)
from tests.trainer.recorder import Entry, recorded
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.config.model import sends_shares
from trainer.contract.corruption import WorkerDigests
from trainer.contract.record import Record
from trainer.engine import Engine
from trainer.model import between_stages
from trainer.parallel.mesh import Mesh
from trainer.pipeline.library import get_accelerator, instructions
from trainer.schedule.interleaving import passes
from trainer.spikes.corruption_check import check_workers

WORLD, HALF = 4, 2
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
RECOMPUTE = {"activation_checkpointing": True}
DOCUMENTS = {"end_of_document_id": 3, "reset_attention_mask": True}


class Course(Record):
    """What a short training showed on one rank. `half`: its state before the third step, if that
    was not its first; `leftovers`: what the pipeline still held after it.
    """

    losses: list[float]
    norms: list[float | None]
    evaluations: list[float]
    disagreements: list[str]
    half: list[Piece]
    pieces: list[Piece]
    leftovers: int


def card(
    pipeline: int,
    tensor: int,
    parts: int,
    dtype: str = "fp32",
    data: dict[str, Any] | None = None,
    **model: Any,
) -> TrainerConfig:
    """A block in each of two parts."""
    value = tiny(pipeline, tensor, dtype, layers=pipeline * 2, **model).model_dump(mode="json")
    value["parallel"] |= {"virtual_stages": parts, "partition": "type:transformer"}
    value["data"] |= data or {}
    return TrainerConfig.model_validate(value)


def sequence_parallel(config: TrainerConfig) -> TrainerConfig:
    parallel = config.parallel.model_copy(update={"sequence_parallel": True})
    return config.model_copy(update={"parallel": parallel})


def train_each(courses: list[tuple[TrainerConfig, int, int, Logical | None]]) -> list[Course]:
    """Steps [first, last) of each card, from whole tensors where there are any; to be run by
    `run_ranks`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: True)
        return [_train(*course) for course in courses]


def _train(config: TrainerConfig, first: int, last: int, tensors: Logical | None) -> Course:
    """In steps whose micro batches are seldom whole rounds; the third step's samples are shorter."""
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    if tensors is not None:
        fill(engine, tensors, first)
    losses, norms, half = [], [], []
    for step in range(first, last):
        if step == HALF > first:
            half = copy_state(engine)
        engine.set_learning_rate(3e-3 * min(1.0, (step + 1) / 3))
        size = (
            2
            * mesh.data
            * (mesh.pipeline, mesh.pipeline + 1, 2 * mesh.pipeline + 1, 2 * mesh.pipeline)[step % 4]
        )
        length = 8 if step == 2 else None
        result = engine.train_step(batches(config, mesh, step, size), size, step, length)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    evaluations = [
        engine.measure(batches(config, mesh, 1000, 2 * count * mesh.data), count).loss
        for count in (1, 3)
    ]
    if mesh.data == 1:
        evaluations += [
            found.loss for found in engine.measure_each(batches(config, mesh, 1000, 2 * 3), 3)
        ]
    pipeline = engine._pipeline
    held = [item for items in pipeline.pipe_buffers.values() for item in items]
    leftovers = sum(item is not None for item in held) + sum(
        len(getattr(pipeline, name, ())) for name in ("_asked", "_sent")
    )
    course = Course(
        losses,
        norms,
        evaluations,
        engine.disagreeing_parameters(),
        half,
        copy_state(engine),
        leftovers,
    )
    engine._pipeline.destroy()
    return course


PLAIN = {
    "four stages": card(4, 1, 1, position_embedding="rotary"),
    "sequence parallel": sequence_parallel(card(2, 2, 1, position_embedding="absolute")),
    "documents": card(2, 2, 1, data=DOCUMENTS),
    "bf16": card(2, 1, 1, "bf16", **RECOMPUTE),
    "fp16": card(2, 2, 1, "fp16"),
}
BOUNDS = {"bf16": BF16_LOSS, "fp16": BF16_LOSS / 8}


def in_parts(config: TrainerConfig) -> TrainerConfig:
    return config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"virtual_stages": 2})}
    )


@cache
def trained() -> list[list[Course]]:
    """Of each rank: every plain card, then every one in parts."""
    cards = [*PLAIN.values(), *map(in_parts, PLAIN.values())]
    ranks: list[list[Course]] = run_ranks(
        train_each, WORLD, [(config, 0, 3, None) for config in cards]
    )
    return ranks


@pytest.mark.parametrize("name", PLAIN)
def test_parts_train_as_plain_stages_do(name: str) -> None:
    """Tied copies stay equal, and the pipeline holds nothing after a step."""
    place, bound = list(PLAIN).index(name), BOUNDS.get(name, FP32_LOSS)
    plain, parted = ([rank[number] for rank in trained()] for number in (place, place + len(PLAIN)))
    for one, other in zip(plain, parted, strict=True):
        assert (other.disagreements, other.leftovers) == ([], 0)
        assert other.losses == parted[0].losses and other.norms == parted[0].norms
        assert (
            max(abs(left - right) for left, right in zip(one.losses, other.losses, strict=True))
            <= bound
        )
        pairs = zip(one.evaluations, other.evaluations, strict=True)
        assert (
            len(one.evaluations) >= 2 and max(abs(left - right) for left, right in pairs) <= bound
        )
        if bound == FP32_LOSS:
            assert other.norms == pytest.approx(one.norms, rel=FP32_NORM)
    if bound == FP32_LOSS:
        whole, gathered = (
            assemble([course.pieces for course in courses]) for courses in (plain, parted)
        )
        for key, kinds in whole.items():
            torch.testing.assert_close(
                gathered[key]["fp32"], kinds["fp32"], rtol=0, atol=FP32_WEIGHT, msg=key
            )


def test_resume_and_recomputation_change_no_bit() -> None:
    """With dropout; on another shape the state is the same and the losses are within rounding."""
    config, dropped = card(2, 1, 2), card(2, 1, 2, **DROPOUT)
    recomputed = card(2, 1, 2, **DROPOUT, **RECOMPUTE)
    first = run_ranks(
        train_each, WORLD, [(each, 0, 4, None) for each in (config, dropped, recomputed)]
    )
    half, dropped_half = (assemble([rank[number].half for rank in first]) for number in (0, 1))
    second = run_ranks(
        train_each,
        WORLD,
        [
            (dropped, HALF, 4, dropped_half),
            (card(2, 1, 1), HALF, 4, half),
            (card(2, 1, 1, **DROPOUT), HALF, 4, dropped_half),
        ],
    )
    straight = assemble([rank[1].pieces for rank in first])
    for other in ([rank[2] for rank in first], [rank[0] for rank in second]):
        found = assemble([course.pieces for course in other])
        assert all(
            torch.equal(found[name][kind], straight[name][kind])
            for name in straight
            for kind in straight[name]
        )
    assert (
        first[0][1].losses == first[0][2].losses == first[0][1].losses[:HALF] + second[0][0].losses
    )
    assert first[0][1].losses != first[0][0].losses
    whole = first[0][0].losses[HALF:]
    assert second[0][1].losses == pytest.approx(whole, abs=FP32_LOSS)
    masked = first[0][1].losses[HALF:]
    assert second[0][2].losses == pytest.approx(masked, abs=FP32_LOSS)


def ways_and_check(config: TrainerConfig) -> tuple[set[str], int, list[WorkerDigests]]:
    """Names of the groups of the messages, updates after a step, and what a check of the arithmetic
    found.
    """
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    engine.train_step(batches(config, mesh, 0, 16), 16)
    links = engine._pipeline.links
    names = {link.group.group_name for link in (*links.into.values(), *links.out.values())}
    found = check_workers(engine.stage(), mesh, 1, 1)
    engine.close()
    return names, engine.optimizer_step(), found


def test_no_way_is_shared_and_all_parts_are_checked() -> None:
    """Two stages send each other activations and gradients both ways: four groups. A check computes
    every layer.
    """
    for names, steps, outcomes in run_ranks(ways_and_check, 2, card(2, 1, 2)):
        assert len(names) == 4 and steps == 1
        for outcome in outcomes:
            assert outcome.first == outcome.second and outcome.fault == ""
            assert len(outcome.first) > 2 * 12  # each of the parameters of two blocks


def test_one_part_is_plain_1f1b() -> None:
    """The order of DeepSpeed's own schedule."""
    for stage in range(4):
        own = [
            command for step in instructions.TrainSchedule(7, 4, stage).steps() for command in step
        ]
        kinds = [
            type(command) is instructions.ForwardPass
            for command in own
            if type(command) in (instructions.ForwardPass, instructions.BackwardPass)
        ]
        assert [item.is_forward for item in passes(7, 4, 1, stage)] == kinds


# ----------------------------------------------------------------------------- between stages
# What travels between stages: shares of what the tensor ranks hold, of the same bits as the whole.

SIZE = 8


class Trained(Record):
    """Losses, this rank's state, and the messages of the second step (the first one also sends
    shapes).
    """

    losses: list[float]
    pieces: Any
    messages: list[Entry]


def train(cards: list[TrainerConfig]) -> list[tuple[Trained, Trained]]:
    """Two short trainings of each between_card: as it is, and with whole hidden states sent."""
    answers = []
    for config in cards:
        ours = _train_between(config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(between_stages, "sends_shares", lambda *_: False)
            answers.append((ours, _train_between(config)))
    return answers


def _train_between(config: TrainerConfig) -> Trained:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    losses = [engine.train_step(batches(config, mesh, 0, SIZE), SIZE, 0).loss]
    with recorded(mesh) as found:
        losses.append(engine.train_step(batches(config, mesh, 1, SIZE), SIZE, 1).loss)
    entries = [entry for entry in found if entry.operation in ("send", "recv")]
    # shorter samples
    losses.append(engine.train_step(batches(config, mesh, 2, SIZE), SIZE, 2, 8).loss)
    losses.append(engine.measure(batches(config, mesh, 9, SIZE), SIZE // 2).loss)
    answer = Trained(losses, copy_state(engine), entries)
    engine._pipeline.destroy()
    return answer


def between_card(
    sequence_parallel: bool = False, dtype: str = "bf16", **changes: Any
) -> TrainerConfig:
    value = tiny(2, 2, dtype, **changes.pop("model", {})).model_dump(mode="json")
    value["parallel"]["sequence_parallel"] = sequence_parallel
    value["data"] |= changes
    return TrainerConfig.model_validate(value)


CARDS = {
    "plain": between_card(),
    "recomputed": between_card(dtype="fp32", model={"activation_checkpointing": True, **DROPOUT}),
    "documents": between_card(**DOCUMENTS),
    "sequence parallel": between_card(sequence_parallel=True),
}


def test_shares_change_no_bit_and_halve_the_messages() -> None:
    """Bytes of hidden states that a rank sends and receives in a step, counted: a half of them
    where two ranks hold the same, and with sequence parallelism the same half with and without
    shares, for they are cut already.
    """
    ranks = run_ranks(train, 4, list(CARDS.values()))
    for number, (name, config) in enumerate(CARDS.items()):
        pairs = [rank[number] for rank in ranks]
        assert all(ours.losses == theirs.losses for ours, theirs in pairs), name
        one, two = (assemble([pair[side].pieces for pair in pairs]) for side in (0, 1))
        assert all(
            torch.equal(one[key][kind], two[key][kind]) for key in two for kind in two[key]
        ), name
        both_ways = 2 * SIZE * config.model.sequence_length * config.model.hidden_size
        before = both_ways // 2 if config.parallel.sequence_parallel else both_ways
        for ours, theirs in pairs:
            assert (hidden_sent(ours), hidden_sent(theirs)) == (both_ways // 2, before), name


def hidden_sent(trained: Trained) -> int:
    """Elements of all messages but the documents' numbers."""
    return sum(entry.elements for entry in trained.messages if entry.dtype.is_floating_point)


@pytest.mark.parametrize(
    ("pipeline", "tensor", "sequence_parallel", "hidden", "expected"),
    [(2, 2, False, 32, True), (1, 2, False, 32, False), (2, 1, False, 32, False), (2, 2, True, 32, False),
     (2, 4, False, 30, False)],
)  # fmt: skip
def test_who_sends_shares(
    pipeline: int, tensor: int, sequence_parallel: bool, hidden: int, expected: bool
) -> None:
    assert sends_shares(pipeline, tensor, sequence_parallel, hidden) is expected

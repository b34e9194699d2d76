"""What travels between stages: shares of what the tensor ranks hold, of the same bits as the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.cases import CPU, assemble, batches, copy_state, tiny
from tests.trainer.recorder import Entry, recorded
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.config.model import sends_shares
from trainer.contract.record import Record
from trainer.engine import Engine
from trainer.model import between_stages
from trainer.parallel.mesh import Mesh

SIZE = 8
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
DOCUMENTS = {"end_of_document_id": 3, "reset_attention_mask": True}


class Trained(Record):
    """Losses, this rank's state, and the messages of the second step (the first one also sends
    shapes).
    """

    losses: list[float]
    pieces: Any
    messages: list[Entry]


def train(cards: list[TrainerConfig]) -> list[tuple[Trained, Trained]]:
    """Two short trainings of each card: as it is, and with whole hidden states sent."""
    answers = []
    for config in cards:
        ours = _train(config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(between_stages, "sends_shares", lambda *_: False)
            answers.append((ours, _train(config)))
    return answers


def _train(config: TrainerConfig) -> Trained:
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


def card(sequence_parallel: bool = False, dtype: str = "bf16", **changes: Any) -> TrainerConfig:
    value = tiny(2, 2, dtype, **changes.pop("model", {})).model_dump(mode="json")
    value["parallel"]["sequence_parallel"] = sequence_parallel
    value["data"] |= changes
    return TrainerConfig.model_validate(value)


CARDS = {
    "plain": card(),
    "recomputed": card(dtype="fp32", model={"activation_checkpointing": True, **DROPOUT}),
    "documents": card(**DOCUMENTS),
    "sequence parallel": card(sequence_parallel=True),
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

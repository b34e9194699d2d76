"""Short trainings with a stop and a resume: losses, and whole logical states before and after."""

from __future__ import annotations

from tests.trainer.cases import CPU, Logical, Piece, assemble, batches, copy_state, fill
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.contract.record import Record
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh

Sums = dict[str, list[float]]
SIZE = 8
HALF, END = 3, 6


class Stretch(Record):
    """Losses of some steps, and the state after HALF (if it was among them) and after the last one.

    `sums`: what the optimizer keeps of whole tensors, after HALF.
    """

    losses: list[float]
    half: Logical
    final: Logical
    sums: Sums


def train_from(
    cards: list[TrainerConfig], first: int, last: int, tensors: Logical | None, sums: Sums
) -> list[tuple[list[float], list[Piece], list[Piece], Sums]]:
    """Of each card, steps [first, last) from whole tensors (None: from the start); to be run by
    `run_ranks`.
    """
    return [_train_from(config, first, last, tensors, sums) for config in cards]


def _train_from(
    config: TrainerConfig, first: int, last: int, tensors: Logical | None, sums: Sums
) -> tuple[list[float], list[Piece], list[Piece], Sums]:
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    if tensors is not None:
        fill(engine, tensors, first)
        engine.restore_optimizer_sums(sums)
    losses, half, half_sums = [], [], {}
    for step in range(first, last):
        engine.set_learning_rate(1e-3 * (step + 1))
        losses.append(engine.train_step(batches(config, mesh, step, SIZE), SIZE, step).loss)
        if step + 1 == HALF:
            half, half_sums = copy_state(engine), engine.optimizer_sums()
    assert engine.sharded_state().optimizer_step == last
    assert engine.disagreeing_parameters() == []
    final = copy_state(engine)
    engine._pipeline.destroy()
    return losses, half, final, half_sums


def stretches(
    cards: list[TrainerConfig],
    data: int,
    first: int,
    last: int,
    tensors: Logical | None,
    sums: Sums | None = None,
) -> list[Stretch]:
    """Train each card on the same ranks, one after the other; all ranks must say the same."""
    size = cards[0].parallel.pipeline * cards[0].parallel.tensor * data
    found = []
    for ranks in zip(
        *run_ranks(train_from, size, cards, first, last, tensors, sums or {}), strict=True
    ):
        assert all((losses, kept) == (ranks[0][0], ranks[0][3]) for losses, _, _, kept in ranks)
        half, final = (assemble([rank[part] for rank in ranks]) for part in (1, 2))
        found.append(Stretch(ranks[0][0], half, final, ranks[0][3]))
    return found


def straight(config: TrainerConfig, data: int = 1) -> Stretch:
    return stretches([config], data, 0, END, None)[0]


def resumed(
    config: TrainerConfig, half: Logical, data: int = 1, sums: Sums | None = None
) -> Stretch:
    return stretches([config], data, HALF, END, half, sums)[0]

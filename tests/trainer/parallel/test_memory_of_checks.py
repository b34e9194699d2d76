"""The guards, the norm and a save work beside a model that fills the device: what they take is
counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.allocations import most_bytes
from tests.trainer.cases import CPU, tiny
from tests.trainer.courses import worker_of
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.control.resume import load_newest
from trainer.control.saving import Saver
from trainer.engine import Engine
from trainer.parallel import replica_check
from trainer.parallel.mesh import Mesh
from trainer.parallel.shard import Sharding, declare
from trainer.schedule.path import Progress

PIECE = 1 << 14  # elements, in these tests; tensors here are 64 times as large
KIB = 1 << 10
# at most three pieces of 8 bytes an element live at once, and small change
BOUND = 3 * 8 * PIECE + 16 * KIB

INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def tensor(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(64 * PIECE + 5, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_checks_of_a_large_tensor_take_a_few_pieces(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_check, "PIECE_ELEMENTS", PIECE)
    values = tensor(dtype)
    grown = values.clone()
    grown[:2] = 3e38  # the sum is infinite, no term is
    parameter = declare(nn.Parameter(values), Sharding(None, 1))
    mesh = Mesh.single(CPU)
    for check in (
        lambda: replica_check.digest(values),
        lambda: replica_check.square_sum(values),
        lambda: replica_check.is_finite(values),
        lambda: replica_check.is_finite(grown),
        lambda: replica_check.disagreements([("weight", parameter)], mesh, "weight"),
        lambda: replica_check.not_finite([("weight", values)], mesh),
    ):
        assert most_bytes(check) <= BOUND


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_pieces_give_the_numbers_of_the_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests to the last bit: integers add alike in any order. What comes before a piece's end and
    after it counts.
    """
    monkeypatch.setattr(replica_check, "PIECE_ELEMENTS", PIECE)
    values = tensor(dtype)
    whole = values.view(INTEGERS[dtype]).sum(dtype=torch.int64)
    assert torch.equal(replica_check.digest(values), whole)
    assert torch.equal(replica_check.digest(values.view(-1, 1).t()), whole)
    exact = float(values.double().square().sum())
    assert float(replica_check.square_sum(values)) == pytest.approx(exact, rel=1e-14)
    for place in (0, PIECE - 1, PIECE, values.numel() - 1):
        for bad in (float("nan"), float("-inf")):
            broken = values.clone()
            broken[place] = bad
            assert not replica_check.is_finite(broken)
            assert not torch.equal(replica_check.digest(broken), whole)
    assert replica_check.is_finite(values) and replica_check.is_finite(values[:0])


def saved(config: TrainerConfig) -> tuple[int, int, int, int]:
    """Bytes of the state; bytes that the norm, a check and a save take."""
    replica_check.PIECE_ELEMENTS = PIECE
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    plan = load_newest(engine, lambda _: None).plan
    saver = Saver(worker_of(config), engine, None, "")
    state = engine.sharded_state()
    held = sum(item.tensor.nbytes for item in state.weights)
    held += sum(part.nbytes for item in state.fragments for part in item.tensors.values())
    steps = iter((1, 2))

    def save() -> None:
        saver.save(Progress(iteration=next(steps)), plan, 0.0)
        assert saver.wait() is None

    found = (
        held,
        most_bytes(engine.params_norm),
        most_bytes(lambda: engine.not_finite(state)),
        most_bytes(save),
    )
    engine.close()
    return found


def test_a_save_takes_its_copy_once_and_a_few_pieces(tmp_path: Path) -> None:
    """The copy is the saver's own, made at the first save and kept: the second takes nothing beside
    the pieces.
    """
    value = tiny(dtype="bf16", hidden_size=256).model_dump(mode="json")
    value["run"]["directory"] = str(tmp_path)
    ((held, norm, check, save),) = run_ranks(saved, 1, TrainerConfig.model_validate(value))
    assert held > 40 * BOUND
    assert norm <= BOUND
    assert check <= BOUND
    assert save <= BOUND

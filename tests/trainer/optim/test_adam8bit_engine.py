"""Eight-bit Adam inside the engine: every topology, resume on the same and on another one, saved
files, memory.

Gradients of two topologies differ by fp32 rounding. Where that moves a moment over the middle
between two codes, it becomes the neighbouring code: another update of one element. Where the blocks
are the same, curves therefore part little further than AdamW's (measured: 2e-6, with bound 1e-5 on
losses of 4.5). Where tensor ranks hold parts of rows that are no whole blocks, all rounding is
another one: curves then part as far as eight bits part from AdamW's (both 1e-4; bound 4e-4). In
bf16 both drown in the rounding of activations, with test_parity's bound.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.cases import CPU, LEARNS, Curve, equal, tiny, train
from tests.trainer.resumes import HALF, resumed, straight, stretches
from tests.trainer.saved_layouts import saved_and_loaded
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.engine import Engine
from trainer.optim.adam8bit import BLOCK, Adam8bit, CodedMoment, FullMoment
from trainer.parallel.mesh import Mesh


def card(
    pipeline: int = 1, tensor: int = 1, dtype: str = "fp32", type: str = "adam8bit", **model: Any
) -> TrainerConfig:
    """64 wide, so that every matrix of a block has moments in 8 bits, and no bias."""
    config = tiny(pipeline, tensor, dtype, hidden_size=64, **model)
    return config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update={"type": type})}
    )


@cache
def curves(
    topology: tuple[int, int, int], dtype: str = "fp32", type: str = "adam8bit"
) -> list[Curve]:
    pipeline, tensor, data = topology
    return run_ranks(train, pipeline * tensor * data, card(pipeline, tensor, dtype, type))


def gap(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


SAME_BLOCKS, OTHER_BLOCKS, BF16 = 1e-5, 4e-4, 2.0**-9 * 4.2 / 8


def check_replicas(ranks: list[Curve]) -> None:
    for rank in ranks:
        assert (rank.losses, rank.norms, rank.disagreements) == (
            ranks[0].losses,
            ranks[0].norms,
            [],
        )


@pytest.mark.parametrize("topology", [(2, 1, 2), (2, 2, 2)], ids=str)
def test_fp32_equals_one_process(topology: tuple[int, int, int]) -> None:
    reference, ranks = curves((1, 1, 1))[0], curves(topology)
    check_replicas(ranks)
    assert gap(ranks[0].losses, reference.losses) <= (
        SAME_BLOCKS if topology[1] == 1 else OTHER_BLOCKS
    )


def test_bf16_stays_within_rounding() -> None:
    reference, ranks = curves((1, 1, 1), "bf16")[0], curves((2, 2, 2), "bf16")
    check_replicas(ranks)
    # bf16's roundings, and the blocks cut otherwise
    assert gap(ranks[0].losses, reference.losses) <= BF16 + OTHER_BLOCKS


def test_eight_bits_learn_as_fp32_moments_do() -> None:
    coded, full = (
        run_ranks(train, 1, card(type=type), LEARNS)[0] for type in ("adam8bit", "adamw")
    )
    assert 0 < gap(coded.losses, full.losses) <= OTHER_BLOCKS
    assert (
        full.losses[-1] < full.losses[0] - 1.5
        and abs(coded.evaluation - full.evaluation) <= OTHER_BLOCKS
    )


def test_tensor_ranks_that_hold_whole_blocks_change_nothing() -> None:
    """512 wide over two tensor ranks: every rank's rows are multiples of 256 elements."""
    wide = {"hidden_size": 512, "sequence_length": 8}
    alone, cut = (
        run_ranks(
            train, ranks, card(1, ranks).model_copy(update={"model": tiny(**wide).model}), (8,) * 5
        )
        for ranks in (1, 2)
    )
    check_replicas(cut)
    assert gap(alone[0].losses, cut[0].losses) <= SAME_BLOCKS


# ----------------------------------------------------------------------------- resume
@pytest.mark.parametrize(("topology", "dtype"), [((2, 1, 2), "fp32"), ((1, 2, 2), "bf16")], ids=str)
def test_resume_on_the_same_topology_is_bitwise(topology: tuple[int, int, int], dtype: str) -> None:
    """A checkpoint holds the moments in fp32; rounded to eight bits again they are the codes that
    they came from.
    """
    pipeline, tensor, data = topology
    config = card(pipeline, tensor, dtype, hidden_dropout=0.1)
    whole = straight(config, data)
    rest = resumed(config, whole.half, data)
    assert rest.losses == whole.losses[HALF:] and equal(rest.final, whole.final)
    assert all(whole.final[name][kind].any() for name in whole.final for kind in whole.final[name])


def test_resume_on_another_topology() -> None:
    """Where blocks become others, moments are rounded a second time: as far off as one more step's
    rounding.
    """
    alone = straight(card()).losses
    (first,) = stretches([card(2)], 2, 0, HALF, None)
    same = resumed(card(), first.final, 2)
    other = resumed(card(1, 2), first.final, 2)
    assert gap(first.losses + same.losses, alone) <= SAME_BLOCKS
    assert gap(first.losses + other.losses, alone) <= OTHER_BLOCKS


# ----------------------------------------------------------------------------- files, memory
@pytest.mark.parametrize("type", ["adam8bit", "adamw"])
def test_both_layouts_bring_a_training_back_bitwise(tmp_path: Path, type: str) -> None:
    for on, ours, original in run_ranks(saved_and_loaded, 4, card(2, 1, "bf16", type), tmp_path):
        assert on == ours == original


def held(config: TrainerConfig) -> tuple[dict[str, type], int, int]:
    """How each parameter's moments are held on this rank, elements held in 8 bits, and bytes of
    their moments.
    """
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    optimizer = engine._optimizer
    assert isinstance(optimizer, Adam8bit)
    kinds, elements, size = {}, 0, 0
    for group in optimizer.param_groups:
        for name, run in optimizer.state[group["params"][0]]["runs"].items():
            first, second = run.moments
            kinds[name] = type(first)
            if isinstance(first, CodedMoment) and isinstance(second, CodedMoment):
                elements += first.codes.numel()
                size += sum(
                    item.nbytes for item in (first.codes, first.scales, second.codes, second.scales)
                )
    engine.close()
    return kinds, elements, size


def test_two_bytes_a_parameter_under_zero() -> None:
    ranks = run_ranks(held, 4, card(1, 2))
    kinds = {name: kind for rank in ranks for name, kind in rank[0].items()}
    for name, kind in kinds.items():
        matrix = name.endswith(
            ("query_key_value.weight", "dense.weight", "up.weight", "down.weight")
        )
        assert kind is (CodedMoment if matrix else FullMoment), name
    # 64 x 64 = 4096 elements: it would be large enough
    assert kinds["embedding.word.weight"] is FullMoment
    # each of the two blocks' four matrices, once
    assert sum(elements for _, elements, _ in ranks) == 2 * 12 * 64 * 64
    assert sum(size for _, _, size in ranks) == pytest.approx(
        2 * (1 + 4 / BLOCK) * 2 * 12 * 64 * 64, rel=0.01
    )

"""Eight ranks with all three axes: what they send each other in a step, and that no order of a sum
matters.

The list of a step is `golden/collectives.txt`: what is sent is known before a GPU is paid for. To
write it again after a change that is meant: `TR11_WRITE_GOLDEN=1 python -m pytest
tests/trainer/parallel/test_collectives.py`.
"""

from __future__ import annotations

import math
import os
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.trainer.eight_ranks import SAVED, STEPS, Observed, observe
from tests.trainer.gradients import worst
from tests.trainer.recorder import NCCL_DTYPES, REDUCING, Entry
from tests.trainer.spawn import run_ranks

GOLDEN = Path(__file__).parent / "golden" / "collectives.txt"
MESSAGES = ("send", "recv")
FP32_LOSS = 2e-6  # as in `test_parity.py`


@cache
def ranks() -> tuple[Observed, ...]:
    with TemporaryDirectory(prefix="eight-") as folder:
        return tuple(run_ranks(observe, 8, folder))


def listed() -> str:
    """The record of a step: ranks that do the same stand together, repeated lines are counted."""
    sections: dict[tuple[str, ...], list[int]] = {}
    for rank, seen in enumerate(ranks()):
        sections.setdefault(tuple(entry.line for entry in seen.entries), []).append(rank)
    blocks = []
    for lines, members in sections.items():
        counted = [(line, len(list(group))) for line, group in groupby(lines)]
        rows = [f"{line}{f'  x {count}' if count > 1 else ''}" for line, count in counted]
        blocks.append("\n".join([f"ranks {' '.join(map(str, members))}", *rows]))
    return "\n\n".join(blocks) + "\n"


def test_the_collectives_of_a_step_are_those_of_the_list() -> None:
    """pipeline 2 x data 2 x tensor 2, bf16, ZeRO-1, two micro batches a replica, the first step."""
    if os.environ.get("TR11_WRITE_GOLDEN") == "1":
        GOLDEN.write_text(listed())
    assert listed() == GOLDEN.read_text()


def test_gradients_are_summed_in_fp32() -> None:
    sums = [entry for seen in ranks() for entry in seen.entries if entry.operation in REDUCING]
    over_replicas = [entry for entry in sums if "data" in entry.group]
    assert sum(entry.elements for entry in over_replicas) > 8 * 7000
    assert {entry.dtype for entry in over_replicas} == {torch.float32}
    # the tied weight
    assert {entry.dtype for entry in sums if entry.group == "pipeline"} == {torch.float32}


def test_nccl_takes_every_tensor() -> None:
    """A dtype that it knows, in the device's memory; what lies in host memory goes over the CPU
    group.
    """
    entries = [entry for seen in ranks() for entry in seen.entries]
    assert [entry for entry in entries if entry.group != "cpu" and entry.is_host] == []
    assert [
        entry for entry in entries if entry.group != "cpu" and entry.dtype not in NCCL_DTYPES
    ] == []
    assert any(entry.is_host for entry in entries)  # the record can tell


def test_every_group_hears_its_operations_in_one_order() -> None:
    groups: dict[str, set[tuple[tuple[str, torch.dtype, int], ...]]] = {}
    messages: dict[tuple[int, int, str], list[tuple[torch.dtype, int]]] = {}
    for rank, seen in enumerate(ranks()):
        own: dict[str, list[tuple[str, torch.dtype, int]]] = {}
        for entry in seen.entries:
            what = (entry.dtype, entry.elements)
            if entry.operation in MESSAGES:
                assert entry.peer is not None
                messages.setdefault(_ends(rank, entry), []).append(what)
            else:
                own.setdefault(entry.communicator, []).append((entry.operation, *what))
        for name, done in own.items():
            groups.setdefault(name, set()).add(tuple(done))
    assert {name: done for name, done in groups.items() if len(done) > 1} == {}
    for (sender, receiver, side), sent in messages.items():
        assert side != "send" or messages[sender, receiver, "recv"] == sent


def _ends(rank: int, entry: Entry) -> tuple[int, int, str]:
    assert entry.peer is not None
    pair = (rank, entry.peer) if entry.operation == "send" else (entry.peer, rank)
    return *pair, entry.operation


@pytest.mark.parametrize("step", [0, 1], ids=["one-micro-batch", "three"])
def test_gradients_with_all_axes(step: int) -> None:
    """The bound is that of `test_gradients.py`."""
    units, name = worst([seen.gradients[step] for seen in ranks()])
    assert units <= 1.0, name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_all_ranks_clip_by_the_same_norm(dtype: str) -> None:
    """Each group adds in its own order, and one replica's sums over the model are one unit in the
    last place too high: the norm that clips is rank 0's on every rank, so tied copies stay equal.
    """
    courses = [seen.courses[dtype] for seen in ranks()]
    for course in courses:
        assert course.clipped_by == courses[0].clipped_by
        assert (course.losses, course.norms) == (courses[0].losses, courses[0].norms)
        assert course.disagreements == []
        assert len(course.losses) == STEPS and all(map(math.isfinite, course.losses))


def test_a_loss_of_its_own_makes_no_rank_wait_alone() -> None:
    """That all courses have ended proves that no rank entered a collective alone: a unit above
    would be a spike.
    """
    assert {len(seen.courses["bf16"].spikes) for seen in ranks()} == {0}


def test_the_order_of_sums_changes_no_number_beyond_rounding() -> None:
    plain, other = ranks()[0].plain, ranks()[0].courses["fp32"]
    assert other.losses == pytest.approx(plain.losses, abs=FP32_LOSS)
    assert other.norms == pytest.approx(plain.norms, rel=1e-5)


def test_a_checkpoint_is_saved_and_resumed_under_any_order() -> None:
    first = ranks()[0]
    assert any("successfully saved" in line for line in first.told)
    assert first.resumed.losses == first.courses["bf16"].losses[SAVED:]
    assert first.resumed.norms == first.courses["bf16"].norms[SAVED:]
    assert [seen.resumed.disagreements for seen in ranks()] == [[]] * 8

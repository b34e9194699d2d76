"""Eight ranks with all three axes: what they send each other in a step, and that no order of a sum
matters.

The list of a step is `golden/collectives.txt`: what is sent is known before a GPU is paid for. To
write it again after a change that is meant: `TR11_WRITE_GOLDEN=1 python -m pytest
tests/trainer/parallel/test_collectives.py`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from datetime import timedelta
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.trainer.cases import CPU, batches, tiny, train
from tests.trainer.eight_ranks import SAVED, STEPS, Observed, observe
from tests.trainer.gradients import worst
from tests.trainer.recorder import NCCL_DTYPES, REDUCING, Entry
from tests.trainer.spawn import run_ranks
from trainer.engine import Engine
from trainer.parallel.groups import Groups
from trainer.parallel.mesh import Mesh

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
    """The bound is that of `test_micro_batches.py`."""
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


# ----------------------------------------------------------------------------- copies
# Tied and replicated parameters stay equal, bit for bit, also where gradients are summed over
# three replicas or more. Two replicas prove nothing: a sum of two numbers has one order.


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_copies_stay_equal_over_three_replicas(dtype: str) -> None:
    card = tiny(2, 1, dtype, hidden_size=36)
    sizes = (12,) * 6
    batch = card.batch.model_copy(update={"global_batch_size": 12})
    (reference,) = run_ranks(
        train, 1, tiny(dtype=dtype, hidden_size=36).model_copy(update={"batch": batch}), sizes
    )
    for rank in run_ranks(train, 6, card.model_copy(update={"batch": batch}), sizes):
        assert rank.disagreements == []
        assert rank.losses == pytest.approx(reference.losses, abs=2e-6 if dtype == "fp32" else 2e-3)


# ----------------------------------------------------------------------------- groups
# Process groups: how many are made, their timeouts, and the groups that DeepSpeed's grid gets.

SHORT, LONG = timedelta(seconds=77), timedelta(minutes=30)


def timeout_of(group: Any) -> timedelta:
    return group._get_backend(CPU).options._timeout


def groups_of_a_training(
    pipeline: int, tensor: int
) -> tuple[Counter[tuple[int, ...]], set[bool], float, bool]:
    """How often each set of ranks got a group, whether all had a timeout, the loss, and whether
    short ones are short.
    """
    made: Counter[tuple[int, ...]] = Counter()
    with_timeout = set()
    new_group = dist.new_group

    def counted(ranks: Any = None, **options: Any) -> Any:
        made[tuple(ranks or ())] += 1
        with_timeout.add(options.get("timeout") == LONG)
        return new_group(ranks, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", counted)
        config = tiny(pipeline, tensor)
        mesh = Mesh.create(config.parallel, CPU)
        engine = Engine.build(config, mesh)
        loss = engine.train_step(batches(config, mesh, 0, 16), 16).loss
        grid = engine._pipeline.grid
        assert mesh.pipeline_group in (None, grid.get_pipe_parallel_group())
        assert mesh.data_group in (None, grid.get_data_parallel_group())
        assert mesh.tensor_group in (None, grid.get_slice_parallel_group())
        assert mesh.model_group in (None, grid.get_model_parallel_group())
        with mesh.groups.first_time(SHORT, "step"):
            pass
        later = engine.train_step(batches(config, mesh, 1, 16), 16).loss
        own = [
            group
            for group in (mesh.pipeline_group, mesh.data_group, mesh.tensor_group)
            if group is not None
        ]
        short = all(
            timeout_of(group) == (LONG if group is dist.group.WORLD else SHORT) for group in own
        )
        kept = timeout_of(dist.group.WORLD) == timedelta(minutes=10)  # the test's own
        engine.close()
    return made, with_timeout, loss + later, short and kept


@pytest.mark.parametrize(("pipeline", "tensor", "ranks"), [(2, 1, 4), (2, 2, 4)])
def test_no_group_is_made_twice_and_each_has_a_timeout(
    pipeline: int, tensor: int, ranks: int
) -> None:
    for made, with_timeout, _, timeouts_are_right in run_ranks(
        groups_of_a_training, ranks, pipeline, tensor
    ):
        assert made and set(made.values()) == {1} and with_timeout == {True}
        assert tuple(range(ranks)) not in made and timeouts_are_right
        # of one's own rank alone, no one else's
        assert sum(len(members) == 1 for members in made) <= 1


def test_on_gpus_the_control_group_is_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the long time; the default group, which is NCCL's there, gets the short one."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        dist, "new_group", lambda ranks=None, **options: calls.append((ranks, options)) or "control"
    )
    monkeypatch.setattr(
        "trainer.parallel.groups._set_pg_timeout",
        lambda timeout, group: calls.append((timeout, group)),
    )
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="default"))
    groups = Groups.create(torch.device("cuda", 0), LONG)
    for what in ("step", "step", "evaluation"):
        with groups.first_time(SHORT, what, 16):
            calls.append((what, None))
    with pytest.raises(KeyError), groups.first_time(SHORT, "check"):
        raise KeyError
    first, second = [(LONG, "default"), ("step", None), (SHORT, "default")], [("step", None)]
    third = [(LONG, "default"), ("evaluation", None), (SHORT, "default"), (LONG, "default")]
    assert calls == [(None, {"backend": "gloo", "timeout": LONG}), *first, *second, *third]

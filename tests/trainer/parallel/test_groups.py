"""Process groups: how many are made, their timeouts, and the groups that DeepSpeed's grid gets."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.trainer.cases import CPU, batches, tiny
from tests.trainer.spawn import run_ranks
from trainer.engine import Engine
from trainer.parallel.groups import Groups
from trainer.parallel.mesh import Mesh

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

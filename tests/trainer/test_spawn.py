"""Ranks of a test: none goes on before all have met."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.trainer.spawn import run_ranks
from trainer.pipeline.library import init_distributed


def late(folder: Path) -> list[str]:
    """Rank 0 is slow to finish a group; what it had finished when this rank went on, after each of
    the two groups.
    """
    connect = distributed_c10d._new_process_group_helper

    def slowly(*arguments: Any, **options: Any) -> Any:
        made = connect(*arguments, **options)
        time.sleep(0.3)
        (folder / f"{len(list(folder.iterdir()))}").touch()
        return made

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "0":
            patch.setattr(distributed_c10d, "_new_process_group_helper", slowly)
        for join in (
            lambda: init_distributed(torch.device("cpu"), timedelta(minutes=1)),
            lambda: dist.new_group([0, 1]),
        ):
            join()
            seen.append(",".join(sorted(path.name for path in folder.iterdir())))
    return seen


def test_no_rank_goes_on_before_all_have_joined(tmp_path: Path) -> None:
    """One that went on and had nothing to exchange was gone while another still connected to it,
    which failed.
    """
    before, after = run_ranks(late, 2, tmp_path, launch=False)
    assert after == before == ["0", "0,1"]

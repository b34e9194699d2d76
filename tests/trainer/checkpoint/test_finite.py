"""No checkpoint is made of numbers that are not finite, whatever makes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.checkpoint.memory_source import (
    MemorySource,
    Sizes,
    extras_of,
    info_of,
    memory_source,
)
from trainer.checkpoint.deepspeed.write import write_deepspeed_layout
from trainer.checkpoint.rewrite import write_checkpoint
from trainer.checkpoint.source import Part
from trainer.contract.errors import CheckpointError

TOPOLOGY = {"tensor": 1, "pipeline": 1, "data": 2}


@pytest.mark.parametrize("write", [write_checkpoint, write_deepspeed_layout])
@pytest.mark.parametrize("number", [math.nan, -math.inf])
@pytest.mark.parametrize(
    ("part", "key"),
    [("weights", "final_norm.bias"), ("optimizer", "blocks.1.mlp.up.weight/exp_avg_sq")],
)
def test_the_tensor_is_named_and_nothing_is_left(
    tmp_path: Path, write: Callable[..., Path], number: float, part: Part, key: str
) -> None:
    source: MemorySource = memory_source(Sizes())
    source.parts[part][key].view(-1)[-1] = number
    with pytest.raises(CheckpointError, match=rf"^{key} \({part}\) holds NaN or infinity"):
        write(tmp_path / "checkpoints", source, 5, extras_of(source), info_of(source, TOPOLOGY))
    assert list((tmp_path / "checkpoints").glob("*")) == []

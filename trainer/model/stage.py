"""One pipeline stage as a check of its arithmetic needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.contract.record import Record
from trainer.model.random import DropoutPlaces
from trainer.parallel.micro_batch import Batch


class Stage(Record):
    """What one worker computes of a micro batch: its layers in order, and on the last stage the
    loss.

    `batch`: the last that it read, None where it reads none. `shape`: samples and tokens of a micro
    batch. `plain_mark`: the number that goes with an ordinary token beside the hidden states, None
    where none do.
    """

    module: nn.Module
    places: DropoutPlaces
    layers: Sequence[Callable[[Any], Any]]
    parameters: Sequence[Sequence[nn.Parameter]]
    loss: Callable[[Tensor, Any], Tensor] | None
    batch: Batch | None
    shape: tuple[int, int]
    hidden_size: int
    plain_mark: int | None

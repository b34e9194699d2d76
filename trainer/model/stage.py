"""One pipeline stage as a check of its arithmetic needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Stage:
    """What one worker computes of a micro batch: its layers in order, and on the last stage the loss.

    `batch`: the last (tokens, labels) that it read, None where it reads none. `shape`: samples and tokens of a micro
    batch. `end_of_document`: the token that the layers must know, None where they know no documents.
    """

    module: nn.Module
    layers: Sequence[Callable[[Any], Any]]
    parameters: Sequence[Sequence[nn.Parameter]]
    loss: Callable[[Tensor, Tensor], Tensor] | None
    batch: tuple[Tensor, Tensor] | None
    shape: tuple[int, int]
    hidden_size: int
    end_of_document: int | None

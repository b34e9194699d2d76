"""A micro batch as the pipeline takes it: what the first stage reads, and what the last one
compares with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

Part: TypeAlias = Tensor | tuple[Tensor, ...]
"""One tensor or several."""

Batch: TypeAlias = tuple[Part, Part]
"""(what the first stage reads, what the last stage compares with)."""


def tensors_of(part: Part) -> tuple[Tensor, ...]:
    """The tensors of a part, in order."""
    if isinstance(part, tuple):
        return part
    return (part,)


def each_tensor(function: Callable[[Tensor], Tensor], part: Part) -> Part:
    """The same part with `function` applied to each tensor."""
    if isinstance(part, tuple):
        return tuple(map(function, part))
    return function(part)

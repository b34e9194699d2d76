"""The ways to soften logits, on any device: as a CPU takes it, as a GPU without a compiler does, as
one with it does.

What is compiled there is here the arithmetic that it is compiled from, over strips of the same
kind.
"""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from trainer.model import loss


def _at_once(values: Tensor, local: Tensor, target: Tensor, room: Tensor, replaces: bool) -> Tensor:
    assert len(values) == loss._strip_height(values.device.type, values.shape[1]), (
        "only whole strips are compiled"
    )
    assert len(room) == 0
    return loss.soften_at_once(values, replaces)


@torch.library.custom_op("tr11_tests::soften", mutates_args=("values",))
def _kernel(values: Tensor, replaces: bool) -> Tensor:
    """The compiled kernel as one operation, for counters."""
    return loss.soften_at_once(values, replaces)


@_kernel.register_fake
def _(values: Tensor, replaces: bool) -> Tensor:
    return values.new_empty(len(values), 1, dtype=torch.float32)


def _one_operation(
    values: Tensor, local: Tensor, target: Tensor, room: Tensor, replaces: bool
) -> Tensor:
    found: Tensor = _kernel(values, replaces)
    return found


COUNTED = replace(loss.COMPILED, soften=_one_operation)
WAYS = {
    "in-cache": loss.IN_CACHE,
    "fused": loss.FUSED,
    "at-once": replace(loss.COMPILED, soften=_at_once),
}


def take(way: str | loss.Softmax, patch: pytest.MonkeyPatch) -> None:
    """All losses of this process go that way."""
    taken = way if isinstance(way, loss.Softmax) else WAYS[way]

    def chosen(device: torch.device) -> loss.Softmax:
        return taken

    patch.setattr(loss, "softmax_for", chosen)

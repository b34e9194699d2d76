"""The soft-max of logits where they lie, strip by strip, by the fastest way that their device has.

On a GPU one compiled kernel reads the logits and writes their soft-max over them: in bf16 at most 8 bytes a logit, of
which the cache saves half, where torch's own operations move 20 and hold strips in fp32. It is compiled for strips of
one height; a shorter one is computed with rows that no one looks at. So a row's numbers depend on nothing else, neither
on the number of tokens nor on the lengths that a run has seen before. A node without a compiler takes torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainer.contract.record import Record
from trainer.model.compiled import compiles_small_parts
from trainer.schedule.pieces import SOFTMAX_ELEMENTS


class Softmax(Record):
    """`soften(values, local, target, room, replaces)`: log-sum-exps [tokens, 1] of a strip [tokens, words], which is
    lost; its soft-max `replaces` it or not. `target`: the strip's numbers at `local`, both [tokens, 1].

    `room`: fp32, of the strip's size, where it `needs_room`. `whole_strips`: all strips are of full height.
    """

    soften: Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor]
    needs_room: bool = True
    whole_strips: bool = False

    def rows(self, count: int, width: int, kind: str) -> int:
        """Rows of memory that `count` rows of logits need."""
        return _up_to(count, _strip_height(kind, width)) if self.whole_strips else count

    def softened(self, logits: Tensor, local: Tensor, target: Tensor, replaces: bool) -> Tensor:
        """Log-sum-exps [count, 1] of the first `count` rows of `logits`, which has as many `rows` as they need."""
        count, width = len(local), logits.shape[1]
        step = _strip_height(logits.device.type, width)
        if not self.whole_strips:
            step = min(step, count)
        found = torch.empty_like(target)
        room = torch.empty(step if self.needs_room else 0, width, dtype=torch.float32, device=logits.device)
        for begin in range(0, count, step):
            part = slice(begin, min(begin + step, count))
            values = logits[begin : begin + step] if self.whole_strips else logits[part]
            sums = self.soften(values, local[part], target[part], room[: len(values)], replaces)
            found[part] = sums[: part.stop - begin]
        return found


def _strip_height(kind: str, width: int) -> int:
    return max(1, SOFTMAX_ELEMENTS[kind] // width)


def _up_to(count: int, height: int) -> int:
    return -(-count // height) * height


def softmax_for(device: torch.device) -> Softmax:
    """The way that is taken on a device."""
    if device.type == "cpu":
        return IN_CACHE
    return COMPILED if compiles_small_parts(device) else FUSED


def _soften_in_cache(values: Tensor, local: Tensor, target: Tensor, room: Tensor, replaces: bool) -> Tensor:
    """On a CPU an exponential costs more than a pass over a strip in cache."""
    wide = values if values.dtype == room.dtype else room.copy_(values)
    top = torch.amax(wide, dim=1, keepdim=True)
    total = wide.sub_(top).exp_().sum(dim=1, keepdim=True)
    if replaces:
        wide.mul_(total.reciprocal())
        if wide is not values:
            values.copy_(wide)
    return top + total.log()


def _soften_fused(values: Tensor, local: Tensor, target: Tensor, room: Tensor, replaces: bool) -> Tensor:
    """The same in half the bytes: two exponentials a number."""
    logarithms = torch.log_softmax(values.float(), 1, out=room)
    normaliser = target - logarithms.gather(1, local)
    if replaces:
        torch.exp(logarithms, out=values)
    return normaliser


def soften_at_once(values: Tensor, replaces: bool) -> Tensor:
    """The same as arithmetic, of which one kernel is made."""
    wide = values.float()
    top = wide.amax(dim=1, keepdim=True)
    total = (wide - top).exp().sum(dim=1, keepdim=True)
    if replaces:
        values.copy_((wide - top).exp() * total.reciprocal())
    return top + total.log()


@cache
def compiled_softening() -> Any:
    """`soften_at_once`, compiled for each width, dtype and use at the first strip of it."""
    return torch.compile(soften_at_once, fullgraph=True, dynamic=False)


def _soften_compiled(values: Tensor, local: Tensor, target: Tensor, room: Tensor, replaces: bool) -> Tensor:
    sums: Tensor = compiled_softening()(values, replaces)
    return sums


IN_CACHE, FUSED = Softmax(_soften_in_cache), Softmax(_soften_fused)
COMPILED = Softmax(_soften_compiled, needs_room=False, whole_strips=True)

"""What one rank holds of a training's state, described independently of the topology that holds it.

A *logical* tensor is a parameter as one process would have it, under its stage-independent name.
Tensor parallelism gives a rank a rectangle of it; ZeRO-1 gives a rank a contiguous run of that
rectangle's flattened elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from trainer.contract.record import Record

MASTERS = "fp32"
FRAGMENT_KINDS = (MASTERS, "exp_avg", "exp_avg_sq")  # that every fragment has
EXTRA_KINDS = ("exp_noise_sq",)  # that it has too where the optimizer keeps more
MOMENT_KINDS = (*FRAGMENT_KINDS[1:], *EXTRA_KINDS)


class LocalTensor(Record):
    """One rank's tensor-parallel slice of a logical weight, in the model's dtype; in a checkpoint also a rectangle of
    an optimizer's tensor, named NAME/KIND.

    `global_shape`: of the logical tensor. `offsets`: where the slice begins in it, one per dimension.
    `tensor`: the live slice; its shape is the slice's. A load writes into it.
    `is_owner`: this rank may write the slice. Several owners of the very same slice are welcome: one of them, the
    least loaded, writes it. A rank with a copy which must not be written (a tied replica) says False.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    is_owner: bool


class Fragment(Record):
    """One rank's ZeRO-1 share of a parameter: elements [start, start + numel) of the flattened
    local slice.

    `global_shape`: of the logical weight. `local_shape`, `offsets`: the tensor-parallel slice inside it.
    `start`, `numel`: the run, in elements of the row-major flattened slice, padding not counted.
    `tensors`: 1-D contiguous tensors of `numel` elements under the keys of FRAGMENT_KINDS, and of EXTRA_KINDS where the
    optimizer keeps them; a load writes into them.
    fp32 is a live view. Moments that are held in another form are copies; they count when the engine takes the state.
    `is_owner`: as for LocalTensor.
    """

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    numel: int
    tensors: dict[str, Tensor]
    is_owner: bool


class ShardedState(Record):
    """Everything of the model and its optimizer that one rank holds. `optimizer_step`: updates done
    so far.

    `kinds`: what every fragment holds, of every rank.
    """

    weights: list[LocalTensor]
    fragments: list[Fragment]
    optimizer_step: int
    kinds: tuple[str, ...] = FRAGMENT_KINDS


class Rectangle(Record):
    """A block of an n-D tensor whose elements are also contiguous in the flattened tensor.

    `offsets`, `sizes`: the block, one number per dimension. `start`: its first element, counted
    from the run's first, so that `run[start : start + prod(sizes)].view(sizes)` is the block.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def rectangles(local_shape: Sequence[int], start: int, numel: int) -> list[Rectangle]:
    """Cut elements [start, start + numel) of a row-major tensor into as few rectangles as possible,
    in order.

    At most 2 x dimensions - 1 of them: a run is the tail of a row, whole rows, and the head of a row.
    Raises ValueError when the run does not lie inside the tensor.
    """
    total = math.prod(local_shape)
    if start < 0 or numel < 0 or start + numel > total:
        raise ValueError(f"run [{start}, {start + numel}) is outside a tensor of {total} elements")
    blocks: list[Rectangle] = []
    _cut((), tuple(local_shape), (start, start + numel), shift=-start, blocks=blocks)
    return blocks


def _cut(
    prefix: tuple[int, ...],
    shape: tuple[int, ...],
    run: tuple[int, int],
    shift: int,
    blocks: list[Rectangle],
) -> None:
    """Append the rectangles of elements `run` in the sub-tensor `shape` at index `prefix`; `shift`
    maps to the run.
    """
    begin, end = run
    if begin == end:
        return
    ones = (1,) * len(prefix)
    if begin == 0 and end == math.prod(shape):
        blocks.append(Rectangle(prefix + (0,) * len(shape), ones + shape, begin + shift))
        return
    row, rest = math.prod(shape[1:]), shape[1:]
    first, last = -(-begin // row), end // row  # whole rows are [first, last)

    def cut_row(index: int, inner: tuple[int, int]) -> None:
        _cut((*prefix, index), rest, inner, shift=shift + index * row, blocks=blocks)

    if first > last:
        cut_row(last, (begin - last * row, end - last * row))
        return
    if begin < first * row:
        cut_row(first - 1, (begin - (first - 1) * row, row))
    if first < last:
        offsets = (*prefix, first, *(0 for _ in rest))
        blocks.append(Rectangle(offsets, (*ones, last - first, *rest), first * row + shift))
    if end > last * row:
        cut_row(last, (0, end - last * row))

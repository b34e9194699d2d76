"""Arithmetic of the original's sharding: layers over stages, parameters over groups, flat groups
over data ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from trainer.contract.record import Record

ALIGNMENT = 2  # DeepSpeed pads a flat group to a multiple of this, times the data-parallel degree


class FlatFragment(Record):
    """A run of a parameter in one data rank's partition of a flat group.

    Elements [first, first + numel) of the flattened parameter are [start, start + numel) of the
    partition.
    """

    name: str
    first: int
    numel: int
    start: int


def partition_elements(total: int, data: int) -> int:
    """Elements of each data rank's partition of a flat group of `total` elements, padding included."""
    unit = ALIGNMENT * data
    return -(-total // unit) * unit // data


def fragments_of(
    parameters: Iterable[tuple[str, int]], data: int, data_rank: int
) -> list[FlatFragment]:
    """What one data rank's partition holds of the (name, elements) that are flattened one after the
    other.
    """
    parameters = list(parameters)
    size = partition_elements(sum(numel for _, numel in parameters), data)
    begin = data_rank * size
    end = (data_rank + 1) * size
    found = []
    position = 0
    for name, numel in parameters:
        low = max(begin, position)
        high = min(end, position + numel)
        if low < high:
            found.append(FlatFragment(name, low - position, high - low, low - begin))
        position += numel
    return found


def padding_elements(total: int, data: int, data_rank: int) -> int:
    """How many of the last elements of a data rank's partition stand for no parameter."""
    size = partition_elements(total, data)
    return size - max(0, min(size, total - data_rank * size))


def stage_bounds(layers: int, stages: int) -> list[int]:
    """First position of each stage of a model of `layers` blocks, and the end: the original's
    balanced division.

    The embedding, each block and the tied head weigh one, the other positions nothing. The division
    is the one whose heaviest and lightest stage differ least; of equal ones, stages take as much as
    they can from the end (DeepSpeed's `partition_method="type:transformer|embedding"`). Raises
    ValueError when a stage would be without a block.
    """
    weights = [0, 1, 0, *([1] * layers), 0, 0, 1, 0]
    bounds = _balanced(weights, stages)
    for first, end in pairwise(bounds):
        if not any(3 <= position < 3 + layers for position in range(first, end)):
            raise ValueError(
                f"{layers} blocks cannot be dealt to {stages} stages so that each has one"
            )
    return bounds


def _balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Linear partition by dynamic programming, as DeepSpeed does it: position k of the last cut
    that wins a tie.
    """
    count = len(weights)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    most = [[math.inf] * (parts + 1) for _ in range(count + 1)]
    least = [[math.inf] * (parts + 1) for _ in range(count + 1)]
    cost = [[math.inf] * (parts + 1) for _ in range(count + 1)]
    cut = [[0] * (parts + 1) for _ in range(count + 1)]
    most[0][0] = cost[0][0] = 0
    for end in range(1, count + 1):
        for part in range(1, min(end, parts) + 1):
            for begin in range(end):
                heaviest = max(most[begin][part - 1], sums[end] - sums[begin])
                lightest = min(least[begin][part - 1], sums[end] - sums[begin])
                if cost[end][part] >= heaviest - lightest:
                    cost[end][part] = heaviest - lightest
                    most[end][part], least[end][part], cut[end][part] = heaviest, lightest, begin
    bounds = [count]
    for part in range(parts, 0, -1):
        bounds.append(cut[bounds[-1]][part])
    return bounds[::-1]

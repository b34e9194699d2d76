"""Which data set each sample comes from, and which part of a data set belongs to training, validation and test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.groups import parse_number

# A member of a blend is asked for this much more than its share, so that rounding never runs it dry.
BLEND_MARGIN = 1.005
# Samples of a mixture that are chosen together, the segments they are cut into, and the choices by which a segment
# runs ahead of its beginning.
BLEND_BLOCK = 1 << 22
BLEND_SEGMENTS = 1024
BLEND_WARM_UP = 256
TILE = 64  # choices that are kept in a cache before they are written to where they belong

FloatArray = npt.NDArray[np.float64]


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of training, validation and test from `949,50,1`; they need not sum to anything. Raises DataError."""
    shares = [parse_number(part, f"split {split!r}") for part in split.split(",")]
    if not 1 <= len(shares) <= 3 or any(share < 0 for share in shares) or sum(shares) <= 0:
        raise DataError(f"split {split!r} must be one to three numbers, none negative, such as 949,50,1")
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    return (shares[0] / total, shares[1] / total, shares[2] / total)


def split_documents(split: str, count: int) -> tuple[range, range, range]:
    """The sequences of training, validation and test among `count`.

    Each boundary is the one before plus the rounded share; what is too many or too few at the end is taken from every
    boundary but the first. Raises DataError for a malformed split.
    """
    bounds = [0]
    for share in parse_split(split):
        bounds.append(bounds[-1] + round(share * float(count)))
    excess = bounds[-1] - count
    bounds[1:] = [max(0, bound - excess) for bound in bounds[1:]]
    return range(bounds[0], bounds[1]), range(bounds[1], bounds[2]), range(bounds[2], bounds[3])


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights divided by their sum. Raises DataError unless all are finite and positive."""
    if not weights or any(not math.isfinite(weight) or weight <= 0 for weight in weights):
        raise DataError(f"weights of the data must be positive numbers, got {', '.join(map(str, weights)) or 'none'}")
    total = 0.0
    for weight in weights:  # one by one: `sum` is compensated from Python 3.12 on, and the last bit decides ties
        total += weight
    return tuple(weight / total for weight in weights)


def member_samples(weights: Sequence[float], samples: int) -> tuple[int, ...]:
    """Samples to prepare of each member for a mixture of `samples`: its share and half a percent more."""
    if len(weights) == 1:
        return (samples,)
    return tuple(math.ceil(samples * weight * BLEND_MARGIN) for weight in normalised(weights))


def build_blend(weights: Sequence[float], samples: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """For each sample of the mixture, the member it comes from and its number there: two arrays [samples].

    Greedy, as Megatron does it: at sample i the member that is furthest behind weight * max(i, 1) is taken, the first
    of equals. The beginning does not depend on `samples`, so a longer mixture only appends.
    """
    shares = np.asarray(normalised(weights), dtype=np.float64)
    shares /= np.sum(shares)  # again, as the original does: it decides the last bit, and so ties
    sets = np.empty(samples, dtype=np.uint8 if len(shares) < 255 else np.uint16)
    numbers = np.empty(samples, dtype=np.int64)
    counts = np.zeros(len(shares))
    for first in range(0, samples, BLEND_BLOCK):
        block = slice(first, min(first + BLEND_BLOCK, samples))
        counts = _choose(shares, counts, first, sets[block], numbers[block])
    return sets, numbers


def _choose(
    shares: FloatArray, counts: FloatArray, first: int, sets: npt.NDArray[Any], numbers: npt.NDArray[np.int64]
) -> FloatArray:
    """The greedy choices for samples `first`, `first + 1`, ...; `counts` is how often each member was taken before.

    The greedy rule forgets its past quickly: from any plausible counts it soon makes the same choices. So the block is
    cut into segments that run side by side, each from guessed counts and some choices ahead of its beginning. Wherever
    a segment did not begin with the counts that the one before it ended with, it is run again from those. At the end
    every segment continues its predecessor, and the first began right, so the result is the sequential one.
    Returns the counts after the block.
    """
    warm_up = max(BLEND_WARM_UP, 8 * len(shares))
    segments = min(BLEND_SEGMENTS, len(sets) // (4 * warm_up))
    length = len(sets) // segments if segments else 0
    done = segments * length
    begins = np.zeros((max(segments, 1), len(shares)))
    begins[0] = counts
    if segments > 1:
        positions = first + length * np.arange(1, segments) - warm_up
        begins[1:] = _guess(shares, positions)
        _run(shares, begins[1:], positions, warm_up)
    ends = begins.copy()
    chosen = sets[:done].reshape(segments, length)
    taken = numbers[:done].reshape(segments, length)
    ends = begins.copy()
    _run(shares, ends, first + length * np.arange(len(ends)), length, chosen, taken)
    while True:
        wrong = 1 + np.flatnonzero(np.any(begins[1:] != ends[:-1], axis=1))
        if not len(wrong):
            break
        begins[wrong] = state = ends[wrong - 1]
        again = np.empty((len(wrong), length), sets.dtype), np.empty((len(wrong), length), np.int64)
        _run(shares, state, first + length * wrong, length, *again)
        chosen[wrong], taken[wrong] = again
        ends[wrong] = state
    last = ends[-1:].copy()
    _run(shares, last, np.array([first + done]), len(sets) - done, sets[None, done:], numbers[None, done:])
    return last[0]


def _guess(shares: FloatArray, positions: npt.NDArray[np.int64]) -> FloatArray:
    """Plausible counts [positions, members]: rare members late, since one that is overdue is taken at once."""
    counts = np.maximum(np.ceil(positions[:, None] * shares) - 1, 0)
    missing = positions - np.sum(counts, axis=1)
    rank = np.argsort(np.argsort(-shares, kind="stable"), kind="stable")
    return counts + (rank < missing[:, None])


def _run(
    shares: FloatArray,
    counts: FloatArray,
    positions: npt.NDArray[np.int64],
    steps: int,
    sets: npt.NDArray[Any] | None = None,
    numbers: npt.NDArray[np.int64] | None = None,
) -> None:
    """Let the greedy rule make `steps` choices in every row; changes `counts` [rows, members] in place.

    Writes the members that were chosen, and how often each had been before, to `sets` and `numbers` [rows, steps].
    """
    rows, members = counts.shape
    flat = counts.reshape(-1)
    begins = np.arange(rows) * members
    weights = np.repeat(shares[None], rows, axis=0)
    x = np.repeat(np.maximum(positions, 1).astype(np.float64)[:, None], members, axis=1)
    behind = np.empty_like(counts)
    chosen, taken = np.empty((TILE, rows), dtype=np.intp), np.empty((TILE, rows))
    for first in range(0, steps, TILE):
        tile = min(TILE, steps - first)
        for step in range(tile):
            np.multiply(weights, x, out=behind)
            np.subtract(behind, counts, out=behind)
            best = behind.argmax(axis=1, out=chosen[step]) + begins
            before = flat.take(best, out=taken[step], mode="clip")
            flat[best] = before + 1
            x += 1
            if first + step == 0:
                x[positions == 0] = 1  # x = max(i, 1) is 1 for sample 0 and for sample 1
        if sets is not None and numbers is not None:
            sets[:, first : first + tile] = chosen[:tile].T
            numbers[:, first : first + tile] = taken[:tile].T

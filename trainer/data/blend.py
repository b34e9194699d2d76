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
# Samples of a mixture that are chosen together, and choices by which a segment of them runs ahead of its beginning.
BLEND_BLOCK = 1 << 22
BLEND_WARM_UP = 512


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
    counts = np.zeros(len(shares), dtype=np.int64)
    for first in range(0, samples, BLEND_BLOCK):
        block = slice(first, min(first + BLEND_BLOCK, samples))
        _choose(shares, counts, first, sets[block])
        order = np.argsort(sets[block], kind="stable")
        taken = np.bincount(sets[block], minlength=len(shares))
        starts = np.cumsum(taken) - taken
        numbers[block][order] = np.arange(len(order)) + np.repeat(counts - starts, taken)
        counts += taken
    return sets, numbers


def _choose(shares: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], first: int, out: npt.NDArray[Any]) -> None:
    """The greedy choices for samples `first`, `first + 1`, ...; `counts` is how often each member was taken before.

    The greedy rule forgets its past quickly: from any plausible counts it soon makes the same choices. So the block is
    cut into segments that run side by side, each from guessed counts and some choices ahead of its beginning. Wherever
    a segment did not begin with the counts that the one before it ended with, it is run again from those. At the end
    every segment continues its predecessor, and the first began right, so the result is the sequential one.
    """
    warm_up = max(BLEND_WARM_UP, 8 * len(shares))
    length = 4 * warm_up
    segments = len(out) // length
    begins = np.zeros((len(shares), max(segments, 1)))
    begins[:, 0] = counts
    if segments > 1:
        positions = first + length * np.arange(1, segments) - warm_up
        begins[:, 1:] = _guess(shares, positions)
        _run(shares, begins[:, 1:], positions, warm_up)
    choices = np.empty((length, segments), dtype=out.dtype)
    ends = begins.copy()
    wrong = np.arange(segments)
    while len(wrong):
        state = begins[:, wrong]
        choices[:, wrong] = _run(shares, state, first + length * wrong, length, out.dtype)
        ends[:, wrong] = state
        wrong = 1 + np.flatnonzero(np.any(begins[:, 1:] != ends[:, :-1], axis=0))
        begins[:, wrong] = ends[:, wrong - 1]
    done = segments * length
    out[:done] = choices.T.reshape(-1)
    rest = _run(shares, ends[:, -1:].copy(), np.array([first + done]), len(out) - done, out.dtype)
    out[done:] = rest[:, 0]


def _guess(shares: npt.NDArray[np.float64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Plausible counts [members, positions]: rare members late, since one that is overdue is taken at once."""
    counts = np.maximum(np.ceil(shares[:, None] * positions) - 1, 0)
    missing = positions - np.sum(counts, axis=0)
    rank = np.argsort(np.argsort(-shares, kind="stable"), kind="stable")
    return counts + (rank[:, None] < missing)


def _run(
    shares: npt.NDArray[np.float64],
    counts: npt.NDArray[np.float64],
    positions: npt.NDArray[np.int64],
    steps: int,
    dtype: npt.DTypeLike = np.uint16,
) -> npt.NDArray[Any]:
    """Let the greedy rule make `steps` choices in every column; changes `counts` [members, columns] in place."""
    columns = np.arange(len(positions))
    choices = np.empty((steps, len(positions)), dtype=dtype)
    behind = np.empty_like(counts)
    for step in range(steps):
        np.multiply(shares[:, None], np.maximum(positions + step, 1), out=behind)
        np.subtract(behind, counts, out=behind)
        chosen = behind.argmax(axis=0)
        choices[step] = chosen
        counts[chosen, columns] += 1
    return choices

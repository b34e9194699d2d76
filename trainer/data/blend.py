"""Which data set each sample comes from, and which part of a data set belongs to training, validation and test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract.errors import DataError
from trainer.data.greedy import FloatArray, advance
from trainer.data.groups import parse_number

# A member of a blend is asked for this much more than its share, so that rounding never runs it dry.
BLEND_MARGIN = 1.005
# Samples of a mixture that are chosen together at most; the segments that they are cut into at most, and fewer for many
# members, so that what a step looks at stays in the caches; the choices by which a segment runs ahead of its beginning.
BLEND_BLOCK = 1 << 24
BLEND_SEGMENTS = 1 << 14
BLEND_CELLS = 1 << 18
BLEND_WARM_UP = 16
REACH = 8  # segments run again after a wrong one; times as many each time


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
    done = 0
    while done < samples:
        block = slice(done, min(done + BLEND_BLOCK, samples))
        done += _choose(shares, counts, done, sets=sets[block], numbers=numbers[block])
    return sets, numbers


def _choose(
    shares: FloatArray, counts: FloatArray, first: int, sets: npt.NDArray[Any], numbers: npt.NDArray[np.int64]
) -> int:
    """Make the greedy choices for some of samples `first`, `first + 1`, ...; returns for how many.

    `counts` is how often each member was taken before, and is brought up to date.

    The greedy rule forgets its past quickly: from any plausible counts it soon makes the same choices. So the block is
    cut into segments that run side by side, each from guessed counts and some choices ahead of its beginning. Wherever
    a segment did not begin with the counts that the one before it ended with, it is run again from those, and with it
    more and more of its successors, from better guesses. At the end every segment continues its predecessor, and the
    first began right, so the result is the sequential one.
    """
    warm_up = max(BLEND_WARM_UP, 4 * len(shares))
    most = min(BLEND_SEGMENTS, max(2, BLEND_CELLS // len(shares)))
    segments = max(1, min(most, len(sets) // (4 * warm_up)))
    length = len(sets) // segments
    if segments > 1:
        length -= 1 - length % 2  # odd, so that the segments' places do not all share a few lines of the caches
    done = segments * length
    begins = np.empty((len(shares), segments))
    begins[:, 0] = counts
    if segments > 1:
        positions = first + length * np.arange(1, segments) - warm_up
        ahead = _guess(shares, positions)
        advance(shares, ahead, positions, warm_up)
        begins[:, 1:] = ahead
    ends = begins.copy()
    chosen = sets[:done].reshape(segments, length)
    taken = numbers[:done].reshape(segments, length)
    advance(shares, ends, first + length * np.arange(segments), steps=length, sets=chosen, numbers=taken)
    reach = REACH
    while len(wrong := 1 + np.flatnonzero(np.any(begins[:, 1:] != ends[:, :-1], axis=0))):
        rows, owner = _followers(wrong, segments, reach)
        positions = first + length * rows - warm_up
        state = _guess(shares, positions, ends[:, wrong - 1][:, owner])
        advance(shares, state, positions, warm_up)
        heads = np.searchsorted(rows, wrong)
        state[:, heads] = ends[:, wrong - 1]
        tried, again = (
            state.copy(),
            (np.empty((len(rows), length), sets.dtype), np.empty((len(rows), length), np.int64)),
        )
        advance(shares, state, first + length * rows, length, *again)
        # Of what follows a segment that was run again, only what continues it is better than what was there.
        breaks = np.append(True, np.any(tried[:, 1:] != state[:, :-1], axis=0))
        breaks[heads] = False
        broken = np.cumsum(breaks)
        better = broken == broken[heads][owner]
        kept = rows[better]
        begins[:, kept], ends[:, kept] = tried[:, better], state[:, better]
        chosen[kept], taken[kept] = again[0][better], again[1][better]
        reach *= REACH
    counts[:] = ends[:, -1]
    return done


def _followers(
    wrong: npt.NDArray[np.int64], segments: int, reach: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Each of the segments `wrong` with the next ones, `reach` in all but none of the next wrong one's, in order.

    Where a rare member was taken is not found in a few steps, so that many segments in a row may have begun wrong.
    Returns the segments, and for each of them the place in `wrong` of the one that it follows.
    """
    every = np.arange(segments)
    owner = np.searchsorted(wrong, every, side="right") - 1
    near = (owner >= 0) & (every - wrong[owner] < reach)
    return every[near], owner[near]


def _guess(shares: FloatArray, positions: npt.NDArray[np.int64], at_least: FloatArray | float = 0.0) -> FloatArray:
    """Plausible counts [members, positions], which sum to the positions; `at_least`: of each member, known before.

    Rare members come late, since one that is overdue is taken soon, and one that came early would stay so for long.
    """
    members = len(shares)
    late = np.where(shares * (8 * members) < 1.0, 1.5, 1.0)
    counts = np.maximum(np.ceil(shares[:, None] * positions - late[:, None]), at_least)
    missing = positions - np.sum(counts, axis=0)
    rank = np.argsort(np.argsort(-shares, kind="stable"), kind="stable")
    counts += rank[:, None] < missing
    counts[np.argmax(shares)] += positions - np.sum(counts, axis=0)
    return counts

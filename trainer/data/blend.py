"""Which data set of a mixture each sample comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract.errors import DataError

# The greedy rule of mixtures, stepped for many columns at once: whichever member is furthest behind
# is taken next.
#
# A column is a moment of one mixture: how often each member was taken before some sample. At sample
# i the member with the largest weight * max(i, 1) - count is taken, the first of equals, in the
# arithmetic of float64 as Megatron does it.
#
# Steps are made in tiles, first in 32-bit integers, which is faster for more than a few members.
# There a member's key is how far it is behind, in fixed point, above its code; so the largest key
# says which member is taken, and the next largest how clear that was. Wherever it was not clear
# beyond every error that fixed point may have, the column's tile is made again in float64, so the
# choices are those of float64 throughout.

TILE = 64  # steps that are kept in a cache before they are written to where they belong
# with more, half as many, since the keys of many members hold fewer bits and drift apart sooner
FEW_MEMBERS = 48
LINE = 64  # bytes of a cache line
# of a key for one whole sample, so that a member may be less than 4 samples behind or ahead
KEY_BITS = 29
MOST_BEHIND = 2.5
MOST_MEMBERS_WITH_KEYS = 255
# A float64 between 0 and 2^51 plus this is rounded to a whole number, which is then in its lowest
# bits.
ROUNDING = 1.5 * 2.0**52
ROUNDING_BITS = int(np.float64(ROUNDING).view(np.int64))
# Where more columns than this are unclear, the keys only cost time, and are left out for some
# tiles.
MOST_UNCLEAR = 0.2
TILES_WITHOUT_KEYS = 15

FloatArray = npt.NDArray[np.float64]


def advance(
    shares: FloatArray,
    counts: FloatArray,
    positions: npt.NDArray[np.int64],
    steps: int,
    sets: npt.NDArray[Any] | None = None,
    numbers: npt.NDArray[np.int64] | None = None,
) -> None:
    """Let the rule make `steps` choices from sample `positions` [columns] on; changes `counts`
    [members, columns].

    Writes the members that were chosen, and how often each had been before, to `sets` and `numbers`
    [columns, steps].
    """
    members, columns = counts.shape
    chosen, taken = (
        _rows_apart(columns, np.uint8 if members < 255 else np.uint16),
        _rows_apart(columns, np.int64),
    )
    keys = None
    if members <= MOST_MEMBERS_WITH_KEYS:
        keys = _Keys(shares, columns)
    exact = _Exactly(shares, columns, chosen.dtype)
    exact_until = 0
    if members <= FEW_MEMBERS:
        height = TILE
    else:
        height = TILE // 2
    for first in range(0, steps, height):
        tile = slice(first, min(first + height, steps))
        rows = tile.stop - first
        samples = positions + first
        unclear = np.ones(columns, dtype=np.bool_)
        if keys is not None and first >= exact_until:
            unclear = keys.advance(counts, samples, chosen[:rows], taken[:rows])
            if np.count_nonzero(unclear) > MOST_UNCLEAR * columns:
                exact_until = first + (TILES_WITHOUT_KEYS + 1) * height
        if unclear.all():
            exact.advance(counts, samples, chosen[:rows], taken[:rows])
        elif unclear.any():
            part = np.ascontiguousarray(counts[:, unclear])
            again = (
                np.empty((rows, part.shape[1]), chosen.dtype),
                np.empty((rows, part.shape[1]), np.int64),
            )
            _Exactly(shares, part.shape[1], chosen.dtype).advance(part, samples[unclear], *again)
            counts[:, unclear], chosen[:rows, unclear], taken[:rows, unclear] = part, *again
        if sets is not None and numbers is not None:
            sets[:, tile] = chosen[:rows].T
            numbers[:, tile] = taken[:rows].T


@dataclass
class _Exactly:
    """Tiles in float64."""

    shares: FloatArray
    columns: int
    kind: np.dtype[Any]

    def __post_init__(self) -> None:
        shape = (len(self.shares), self.columns)
        self.behind, self.is_most = np.empty(shape), np.empty(shape, dtype=np.bool_)
        self.most, self.before = np.empty(self.columns), np.empty(self.columns)
        # Every member has a code, the first the largest, so the largest code among equals is that
        # of the first.
        self.codes = np.arange(shape[0], 0, -1, dtype=self.kind)[:, None]
        if self.kind == np.uint8:
            self.marks = self.is_most.view(np.uint8)
        else:
            self.marks = np.empty(shape, dtype=self.kind)
        self.ends = shape[0] * self.columns + np.arange(self.columns)
        self.place = np.empty(self.columns, dtype=np.intp)

    def advance(
        self,
        counts: FloatArray,
        samples: npt.NDArray[np.int64],
        chosen: npt.NDArray[Any],
        taken: npt.NDArray[np.int64],
    ) -> None:
        """One tile: fills `chosen` and `taken` [rows, columns], changes `counts`, which is
        contiguous.
        """
        flat = counts.reshape(-1)
        place = self.place
        before = self.before
        weights = self.shares[:, None]
        x = np.maximum(samples, 1).astype(np.float64)
        for row in range(len(chosen)):
            np.multiply(weights, x, out=self.behind)
            np.subtract(self.behind, counts, out=self.behind)
            np.maximum.reduce(self.behind, axis=0, out=self.most)
            np.equal(self.behind, self.most, out=self.is_most)
            np.multiply(self.is_most.view(np.uint8), self.codes, out=self.marks)
            np.maximum.reduce(self.marks, axis=0, out=chosen[row])
            np.multiply(chosen[row], -self.columns, out=place, dtype=np.intp)
            np.add(place, self.ends, out=place)
            flat.take(place, out=before, mode="clip")
            taken[row] = before
            np.add(before, 1, out=before)
            flat[place] = before
            np.add(x, 1, out=x)
            if row == 0:
                x[samples == 0] = 1  # x = max(i, 1) is 1 for sample 0 and for sample 1
        np.subtract(len(self.shares), chosen, out=chosen, dtype=self.kind)


@dataclass
class _Keys:
    """Tiles in 32-bit integers: key = (weight * i - count, in fixed point) * 2^bits + code."""

    shares: FloatArray
    columns: int

    def __post_init__(self) -> None:
        members = len(self.shares)
        self.bits = members.bit_length()
        self.scale = 2 ** (KEY_BITS - self.bits)
        self.codes = np.arange(members, 0, -1, dtype=np.int32)[:, None]
        self.pace = np.rint(self.shares * self.scale).astype(np.int32)[:, None] << self.bits
        self.keys = np.empty((members, self.columns), dtype=np.int32)
        self.ends = members * self.columns + np.arange(self.columns)
        self.shares_of_codes = np.append(0.0, self.shares[::-1])
        self.code, self.place = (np.empty(self.columns, dtype=np.intp) for _ in range(2))
        self.lower = np.empty(self.columns, dtype=np.int32)
        self.due, self.ahead = np.empty(self.columns), np.empty(self.columns)
        self.top, self.second = (
            _rows_apart(self.columns, np.int32),
            _rows_apart(self.columns, np.int32),
        )

    def advance(
        self,
        counts: FloatArray,
        samples: npt.NDArray[np.int64],
        chosen: npt.NDArray[Any],
        taken: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """One tile: fills `chosen` and `taken`, changes `counts`; not in unclear columns, which are
        returned.
        """
        rows = len(chosen)
        members = len(self.shares)
        weights = self.shares[:, None]
        one = 1 << KEY_BITS
        mask = (1 << self.bits) - 1
        x = samples.astype(np.float64)
        behind = weights * x
        behind -= counts
        unclear = np.any(np.abs(behind) > MOST_BEHIND, axis=0)
        unclear |= samples == 0  # where x is not the number of the sample
        np.clip(behind, -MOST_BEHIND, MOST_BEHIND, out=behind)
        behind *= self.scale
        np.copyto(self.keys, np.rint(behind, out=behind), casting="unsafe")
        self.keys <<= self.bits
        self.keys += self.codes
        flat = self.keys.reshape(-1)
        top = self.top[:rows]
        second = self.second[:rows]
        for row in range(rows):
            np.maximum.reduce(self.keys, axis=0, out=top[row])
            np.bitwise_and(top[row], mask, out=self.code, dtype=np.intp)
            np.multiply(self.code, -self.columns, out=self.place)
            np.add(self.place, self.ends, out=self.place)
            np.subtract(top[row], one, out=self.lower)
            flat[self.place] = self.lower
            np.maximum.reduce(self.keys, axis=0, out=second[row])
            np.add(self.keys, self.pace, out=self.keys)
            # How often it was taken before is weight * i - behind, but for errors far below a half.
            self.shares_of_codes.take(self.code, out=self.due, mode="clip")
            np.multiply(self.due, x, out=self.due)
            np.multiply(top[row], 1.0 / one, out=self.ahead)
            np.subtract(self.due, self.ahead, out=self.due)
            np.add(self.due, ROUNDING, out=self.due)
            np.subtract(self.due.view(np.int64), ROUNDING_BITS, out=taken[row])
            np.add(x, 1, out=x)
        np.subtract(top, second, out=second)
        unclear |= np.minimum.reduce(second, axis=0) <= self._tolerance(rows, float(x.max()))
        unclear |= np.maximum.reduce(top, axis=0) > MOST_BEHIND * one
        np.bitwise_and(top, mask, out=chosen, casting="unsafe")
        np.subtract(members, chosen, out=chosen, dtype=chosen.dtype)
        now = weights * x
        now -= self.keys * (1.0 / one)
        np.copyto(counts, np.rint(now, out=now), where=~unclear)
        return unclear

    def _tolerance(self, rows: int, last: float) -> int:
        """The distance of two keys up to which it is not certain which member is further behind.

        Each is off by half a unit where it begins and at every step, and weight * i by half of its
        last bit.
        """
        units = rows + 2 + 2 * int(np.ceil(last * self.scale * 2.0**-52))
        return (units + 1) << self.bits


def _rows_apart(columns: int, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array [TILE, columns] whose rows do not begin at the same lines of a cache, to be read by
    columns.
    """
    return np.empty((TILE, columns + LINE // np.dtype(kind).itemsize), dtype=kind)[:, :columns]


# A member of a blend is asked for this much more than its share, so that rounding never runs it
# dry.
BLEND_MARGIN = 1.005
# Samples of a mixture that are chosen together at most; the segments that they are cut into at
# most, and fewer for many members, so that what a step looks at stays in the caches; the choices by
# which a segment runs ahead of its beginning.
BLEND_BLOCK = 1 << 24
BLEND_SEGMENTS = 1 << 14
BLEND_CELLS = 1 << 18
BLEND_WARM_UP = 16
REACH = 8  # segments run again after a wrong one; times as many each time


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights divided by their sum. Raises DataError unless all are finite and positive."""
    if not weights or any(not math.isfinite(weight) or weight <= 0 for weight in weights):
        raise DataError(
            f"weights of the data must be positive numbers, got {', '.join(map(str, weights)) or 'none'}"
        )
    total = 0.0
    # one by one: `sum` is compensated from Python 3.12 on, and the last bit decides ties
    for weight in weights:
        total += weight
    return tuple(weight / total for weight in weights)


def member_samples(weights: Sequence[float], samples: int) -> tuple[int, ...]:
    """Samples to prepare of each member for a mixture of `samples`: its share and half a percent
    more.
    """
    if len(weights) == 1:
        return (samples,)
    return tuple(math.ceil(samples * weight * BLEND_MARGIN) for weight in normalised(weights))


def build_blend(
    weights: Sequence[float], samples: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """For each sample of the mixture, the member it comes from and its number there: two arrays
    [samples].

    Greedy, as Megatron does it: at sample i the member that is furthest behind weight * max(i, 1)
    is taken, the first of equals. The beginning does not depend on `samples`, so a longer mixture
    only appends.
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
    shares: FloatArray,
    counts: FloatArray,
    first: int,
    sets: npt.NDArray[Any],
    numbers: npt.NDArray[np.int64],
) -> int:
    """Make the greedy choices for some of samples `first`, `first + 1`, ...; returns for how many.

    `counts` is how often each member was taken before, and is brought up to date.

    The greedy rule forgets its past quickly: from any plausible counts it soon makes the same
    choices. So the block is cut into segments that run side by side, each from guessed counts and
    some choices ahead of its beginning. Wherever a segment did not begin with the counts that the
    one before it ended with, it is run again from those, and with it more and more of its
    successors, from better guesses. At the end every segment continues its predecessor, and the
    first began right, so the result is the sequential one.
    """
    warm_up = max(BLEND_WARM_UP, 4 * len(shares))
    most = min(BLEND_SEGMENTS, max(2, BLEND_CELLS // len(shares)))
    segments = max(1, min(most, len(sets) // (4 * warm_up)))
    length = len(sets) // segments
    if segments > 1:
        # odd, so that the segments' places do not all share a few lines of the caches
        length -= 1 - length % 2
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
    advance(
        shares, ends, first + length * np.arange(segments), steps=length, sets=chosen, numbers=taken
    )
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
        # Of what follows a segment that was run again, only what continues it is better than what
        # was there.
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
    """Each of the segments `wrong` with the next ones, `reach` in all but none of the next wrong
    one's, in order.

    Where a rare member was taken is not found in a few steps, so that many segments in a row may
    have begun wrong. Returns the segments, and for each of them the place in `wrong` of the one
    that it follows.
    """
    every = np.arange(segments)
    owner = np.searchsorted(wrong, every, side="right") - 1
    near = (owner >= 0) & (every - wrong[owner] < reach)
    return every[near], owner[near]


def _guess(
    shares: FloatArray, positions: npt.NDArray[np.int64], at_least: FloatArray | float = 0.0
) -> FloatArray:
    """Plausible counts [members, positions], which sum to the positions; `at_least`: of each
    member, known before.

    Rare members come late, since one that is overdue is taken soon, and one that came early would
    stay so for long.
    """
    members = len(shares)
    late = np.where(shares * (8 * members) < 1.0, 1.5, 1.0)
    counts = np.maximum(np.ceil(shares[:, None] * positions - late[:, None]), at_least)
    missing = positions - np.sum(counts, axis=0)
    rank = np.argsort(np.argsort(-shares, kind="stable"), kind="stable")
    counts += rank[:, None] < missing
    counts[np.argmax(shares)] += positions - np.sum(counts, axis=0)
    return counts

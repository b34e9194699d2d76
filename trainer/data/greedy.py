"""The greedy rule of mixtures, stepped for many columns at once: whichever member is furthest behind is taken next.

A column is a moment of one mixture: how often each member was taken before some sample. At sample i the member with
the largest weight * max(i, 1) - count is taken, the first of equals, in the arithmetic of float64 as Megatron does it.

Steps are made in tiles, first in 32-bit integers, which is faster for more than a few members. There a member's key is
how far it is behind, in fixed point, above its code; so the largest key says which member is taken, and the next
largest how clear that was. Wherever it was not clear beyond every error that fixed point may have, the column's tile
is made again in float64, so the choices are those of float64 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

TILE = 64  # steps that are kept in a cache before they are written to where they belong
FEW_MEMBERS = 48  # with more, half as many, since the keys of many members hold fewer bits and drift apart sooner
LINE = 64  # bytes of a cache line
KEY_BITS = 29  # of a key for one whole sample, so that a member may be less than 4 samples behind or ahead
MOST_BEHIND = 2.5
MOST_MEMBERS_WITH_KEYS = 255
# A float64 between 0 and 2^51 plus this is rounded to a whole number, which is then in its lowest bits.
ROUNDING = 1.5 * 2.0**52
ROUNDING_BITS = int(np.float64(ROUNDING).view(np.int64))
# Where more columns than this are unclear, the keys only cost time, and are left out for some tiles.
MOST_UNCLEAR, TILES_WITHOUT_KEYS = 0.2, 15

FloatArray = npt.NDArray[np.float64]


def advance(
    shares: FloatArray,
    counts: FloatArray,
    positions: npt.NDArray[np.int64],
    steps: int,
    sets: npt.NDArray[Any] | None = None,
    numbers: npt.NDArray[np.int64] | None = None,
) -> None:
    """Let the rule make `steps` choices from sample `positions` [columns] on; changes `counts` [members, columns].

    Writes the members that were chosen, and how often each had been before, to `sets` and `numbers` [columns, steps].
    """
    members, columns = counts.shape
    chosen, taken = _rows_apart(columns, np.uint8 if members < 255 else np.uint16), _rows_apart(columns, np.int64)
    keys = _Keys(shares, columns) if members <= MOST_MEMBERS_WITH_KEYS else None
    exact = _Exactly(shares, columns, chosen.dtype)
    exact_until = 0
    height = TILE if members <= FEW_MEMBERS else TILE // 2
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
            again = np.empty((rows, part.shape[1]), chosen.dtype), np.empty((rows, part.shape[1]), np.int64)
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
        # Every member has a code, the first the largest, so the largest code among equals is that of the first.
        self.codes = np.arange(shape[0], 0, -1, dtype=self.kind)[:, None]
        self.marks = self.is_most.view(np.uint8) if self.kind == np.uint8 else np.empty(shape, dtype=self.kind)
        self.ends = shape[0] * self.columns + np.arange(self.columns)
        self.place = np.empty(self.columns, dtype=np.intp)

    def advance(
        self,
        counts: FloatArray,
        samples: npt.NDArray[np.int64],
        chosen: npt.NDArray[Any],
        taken: npt.NDArray[np.int64],
    ) -> None:
        """One tile: fills `chosen` and `taken` [rows, columns], changes `counts`, which is contiguous."""
        flat, place, before = counts.reshape(-1), self.place, self.before
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
        self.top, self.second = _rows_apart(self.columns, np.int32), _rows_apart(self.columns, np.int32)

    def advance(
        self,
        counts: FloatArray,
        samples: npt.NDArray[np.int64],
        chosen: npt.NDArray[Any],
        taken: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """One tile: fills `chosen` and `taken`, changes `counts`; not in unclear columns, which are returned."""
        rows, members = len(chosen), len(self.shares)
        weights, one, mask = self.shares[:, None], 1 << KEY_BITS, (1 << self.bits) - 1
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
        flat, top, second = self.keys.reshape(-1), self.top[:rows], self.second[:rows]
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

        Each is off by half a unit where it begins and at every step, and weight * i by half of its last bit.
        """
        units = rows + 2 + 2 * int(np.ceil(last * self.scale * 2.0**-52))
        return (units + 1) << self.bits


def _rows_apart(columns: int, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array [TILE, columns] whose rows do not begin at the same lines of a cache, to be read by columns."""
    return np.empty((TILE, columns + LINE // np.dtype(kind).itemsize), dtype=kind)[:, :columns]

"""Numbers against numbers: which tensors of two states differ, where, by how much; which copies
inside one disagree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from trainer.checkpoint.fingerprint import EMPTY, Fingerprint, fingerprint
from trainer.checkpoint.rewrite import blocks_of
from trainer.contract.record import Record
from trainer.debug.record import RankCoordinates
from trainer.debug.snapshot import KINDS, Kind, StateSnapshot, TensorCopy, owners

PIECE_ELEMENTS = 1 << 24
Axis = Literal["stage", "tensor", "data"]
OnNumbers = Callable[[int], None]
_PARTS = (
    "embedding.word",
    "embedding.position",
    "embedding",
    "blocks",
    "final_norm",
    "input_norm",
    "attention.query_key_value",
    "attention.dense",
    "attention",
    "post_attention_norm",
    "mlp.up",
    "mlp.down",
    "mlp",
    "weight",
    "bias",
)


class Delta(Record):
    """How two tensors differ. `different`: how many of `count` numbers, None where only
    fingerprints are known.

    `largest`: the largest |a - b| seen (of single numbers, or of min, max, mean and norm), NaN
    where one side is NaN. `at`: its index in the whole tensor; `a`, `b`: the two numbers there.
    """

    count: int
    different: int | None
    largest: float
    at: tuple[int, ...] | None = None
    a: float | None = None
    b: float | None = None


class Difference(Record):
    """One tensor that differs. `place`: who holds it, None where whole tensors were compared.

    `only`: "a" or "b" where the other side does not have the tensor at all (then there is no
    `delta`).
    """

    kind: Kind
    name: str
    place: RankCoordinates | None
    replicated: bool
    delta: Delta | None
    only: Literal["a", "b"] | None = None


class Violation(Record):
    """Copies inside one state that must be equal and are not: `place` differs from `against` along
    `axis`.
    """

    axis: Axis
    kind: Kind
    name: str
    place: RankCoordinates
    against: RankCoordinates
    delta: Delta


def model_order(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key: the order in which the model uses its tensors; names that are not known come last,
    by name.
    """
    rest, key = name, []
    while rest:
        part = next((part for part in _PARTS if rest == part or rest.startswith(f"{part}.")), None)
        if part is None:
            part = rest.split(".")[0]
            number = re.fullmatch(r"\d+", part)
            key.append((int(part), "") if number else (len(_PARTS), part))
        else:
            key.append((_PARTS.index(part), ""))
        rest = rest[len(part) + 1 :]
    return tuple(key)


def differences(
    a: StateSnapshot, b: StateSnapshot, tolerance: float, on_numbers: OnNumbers
) -> list[Difference]:
    """Tensors that differ by more than `tolerance` x the largest absolute value of A's, in the
    order of the model.

    `tolerance` 0 asks for the same numbers. `on_numbers` is told how many were compared. Kinds that
    one side does not have at all (a dump has no moments) are not compared.
    """
    kinds = {copy.kind for copy in a.copies} & {copy.kind for copy in b.copies}
    compare = _by_place if _is_aligned(a, b) else _by_whole
    found = compare(
        [copy for copy in a.copies if copy.kind in kinds],
        [copy for copy in b.copies if copy.kind in kinds],
        _Rule(tolerance, on_numbers),
    )
    return sorted(found, key=lambda item: (model_order(item.name), KINDS.index(item.kind)))


class _Rule(Record):
    tolerance: float
    on_numbers: OnNumbers

    def exceeds(self, largest: float, scale: float) -> bool:
        return math.isnan(largest) or largest > self.tolerance * scale


def _is_aligned(a: StateSnapshot, b: StateSnapshot) -> bool:
    return not a.is_checkpoint and not b.is_checkpoint and dict(a.topology) == dict(b.topology)


def _by_place(a: list[TensorCopy], b: list[TensorCopy], rule: _Rule) -> Iterator[Difference]:
    """Rank by rank, on one topology."""
    left, right = ({(copy.kind, copy.name, copy.place): copy for copy in side} for side in (a, b))
    for key, one in left.items():
        other = right.get(key)
        if other is None:
            yield _difference(one, None, only="a")
            continue
        delta = copies_delta(one, other, rule)
        if delta is not None:
            yield _difference(one, delta)
    for key, other in right.items():
        if key not in left:
            yield _difference(other, None, only="b")


def _difference(
    copy: TensorCopy, delta: Delta | None, only: Literal["a", "b"] | None = None
) -> Difference:
    return Difference(copy.kind, copy.name, copy.place, copy.replicated, delta=delta, only=only)


def _by_whole(a: list[TensorCopy], b: list[TensorCopy], rule: _Rule) -> Iterator[Difference]:
    """Logical tensors. Where one side tells who holds what, each of its copies is compared with the
    other's whole.
    """
    left, right = owners(a), owners(b)
    for key in left.keys() | right.keys():
        if key not in left or key not in right:
            only: Literal["a", "b"] = "b"
            if key in left:
                only = "a"
            yield Difference(*key, None, False, None, only=only)
            continue
        ones, others = left[key], right[key]
        if ones[0].global_shape != others[0].global_shape:
            yield Difference(
                *key, None, False, Delta(math.prod(ones[0].global_shape), None, math.nan)
            )
        elif any(copy.read is None for copy in (*ones, *others)):
            delta = _numbers_delta(
                _joined(ones, rule), _joined(others, rule), rule, ones[0].dtype == others[0].dtype
            )
            if delta is not None:
                yield Difference(*key, None, False, delta)
        else:
            yield from _located(key, (a, b), (ones, others), rule)


def _located(
    key: tuple[Kind, str],
    sides: tuple[list[TensorCopy], list[TensorCopy]],
    wholes: tuple[list[TensorCopy], list[TensorCopy]],
    rule: _Rule,
) -> Iterator[Difference]:
    swapped = wholes[1][0].place is None and wholes[0][0].place is not None
    if swapped:
        side, whole = (sides[0], wholes[1])
    else:
        side, whole = (sides[1], wholes[0])
    for copy in side:
        if (copy.kind, copy.name) == key:
            delta = _read_delta(whole, copy, rule, swapped)
            if delta is not None:
                yield _difference(copy, delta)


def copies_delta(one: TensorCopy, other: TensorCopy, rule: _Rule) -> Delta | None:
    """How two copies of the same rectangle differ; None when they do not."""
    if (one.global_shape, one.offsets, one.shape) != (
        other.global_shape,
        other.offsets,
        other.shape,
    ):
        return Delta(math.prod(one.global_shape), None, math.nan)
    mine, theirs, same_type = one.numbers, other.numbers, one.dtype == other.dtype
    if same_type and mine is not None and theirs is not None and mine.digest == theirs.digest:
        rule.on_numbers(mine.count)
        return None
    if one.read is not None and other.read is not None:
        return _read_delta([one], other, rule, swapped=False)
    assert mine is not None and theirs is not None
    rule.on_numbers(mine.count)
    return _numbers_delta(mine, theirs, rule, same_type)


# ----------------------------------------------------------------------------- from fingerprints
def _joined(copies: list[TensorCopy], rule: _Rule) -> Fingerprint:
    found = EMPTY
    for copy in copies:
        numbers = copy.numbers
        if numbers is None:
            for offsets, sizes in blocks_of(copy.shape, PIECE_ELEMENTS):
                piece = _read(copy, offsets, sizes)
                begin = [base + inner for base, inner in zip(copy.offsets, offsets, strict=True)]
                found = found.joined(fingerprint(piece, copy.global_shape, begin))
        else:
            found = found.joined(numbers)
    rule.on_numbers(found.count)
    return found


def _numbers_delta(
    one: Fingerprint, other: Fingerprint, rule: _Rule, same_type: bool
) -> Delta | None:
    """From fingerprints alone. Without a tolerance the digests decide, where both were taken of one
    dtype.
    """
    if same_type and one.digest == other.digest and one.count == other.count:
        return None
    pairs = [
        (one.minimum, other.minimum, one.largest),
        (one.maximum, other.maximum, one.largest),
        (one.mean, other.mean, one.largest),
        (one.norm, other.norm, one.norm),
    ]
    if one.non_finite != other.non_finite:
        return Delta(one.count, None, math.nan)
    pairs = [
        pair
        for pair in pairs
        if pair[0] != pair[1] and not (math.isnan(pair[0]) and math.isnan(pair[1]))
    ]
    gaps = [abs(mine - theirs) for mine, theirs, _ in pairs]
    if any(map(math.isnan, gaps)):
        largest = math.nan
    else:
        largest = max(gaps, default=0.0)
    exact = same_type and not rule.tolerance
    if exact or any(
        rule.exceeds(gap, scale) for gap, (_, _, scale) in zip(gaps, pairs, strict=True)
    ):
        return Delta(one.count, None, largest)
    return None


# ----------------------------------------------------------------------------- from the tensors
def _read_delta(
    whole: Sequence[TensorCopy], copy: TensorCopy, rule: _Rule, swapped: bool
) -> Delta | None:
    """`copy` against the same rectangle of the whole tensor, which `whole` make up. `swapped`: A is
    `copy`.
    """
    seen = _Seen(rule)
    for offsets, sizes in blocks_of(copy.shape, PIECE_ELEMENTS):
        begin = [base + inner for base, inner in zip(copy.offsets, offsets, strict=True)]
        one, other = _window(whole, begin, sizes), _read(copy, offsets, sizes)
        if swapped:
            one, other = other, one
        seen.look(one, other, begin)
    return seen.verdict()


class _Seen:
    """What was seen of one tensor so far, piece by piece."""

    def __init__(self, rule: _Rule):
        self.rule = rule
        self.count = self.different = 0
        self.scale = 0.0
        self.worst = Delta(0, 0, 0.0)

    def look(self, a: Tensor, b: Tensor, begin: Sequence[int]) -> None:
        self.count += a.numel()
        self.rule.on_numbers(a.numel())
        if not a.numel():
            return
        wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        a, b = a.to(wide), b.to(wide)
        self.scale = max(self.scale, float(a.abs().nan_to_num(0.0, posinf=0.0).max()))
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        different = int(unequal.sum())
        if not different:
            return
        gaps = torch.where(unequal, (a - b).abs(), 0.0)
        # One side NaN, or infinities of opposite sign: nothing is further apart.
        gaps = torch.where(unequal & (gaps.isnan() | gaps.isinf()), torch.inf, gaps)
        place = int(gaps.argmax())
        largest, index = float(gaps.flatten()[place]), _unravel(place, a.shape)
        self.different += different
        if largest > self.worst.largest:
            at = tuple(base + inner for base, inner in zip(begin, index, strict=True))
            self.worst = Delta(0, 0, largest, at=at, a=float(a[index]), b=float(b[index]))

    def verdict(self) -> Delta | None:
        if not self.different or not self.rule.exceeds(self.worst.largest, self.scale):
            return None
        return replace(self.worst, count=self.count, different=self.different)


def _unravel(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        place, inner = divmod(place, size)
        index.append(inner)
    return tuple(reversed(index))


def _read(copy: TensorCopy, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    assert copy.read is not None
    return copy.read(offsets, sizes)


def _window(copies: Sequence[TensorCopy], begin: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A rectangle of a whole tensor out of the copies that make it up; NaN where none of them has
    it.
    """
    end = [start + size for start, size in zip(begin, sizes, strict=True)]
    result: Tensor | None = None
    for copy in copies:
        low = [max(start, offset) for start, offset in zip(begin, copy.offsets, strict=True)]
        high = [
            min(stop, offset + size)
            for stop, offset, size in zip(end, copy.offsets, copy.shape, strict=True)
        ]
        if any(start >= stop for start, stop in zip(low, high, strict=True)):
            continue
        inner = [start - offset for start, offset in zip(low, copy.offsets, strict=True)]
        extent = [stop - start for start, stop in zip(low, high, strict=True)]
        part = _read(copy, inner, extent)
        if extent == list(sizes):
            return part
        if result is None:
            result = torch.full(tuple(sizes), math.nan, dtype=part.dtype)
        place = tuple(
            slice(start - base, stop - base)
            for start, stop, base in zip(low, high, begin, strict=True)
        )
        result[place] = part
    if result is None:
        return torch.full(tuple(sizes), math.nan)
    return result


# ----------------------------------------------------------------------------- inside one state
def violations(snapshot: StateSnapshot, on_numbers: OnNumbers) -> list[Violation]:
    """Copies of dumps that must be equal to the last bit and are not, in the order of the model.

    Over stages: a parameter that several stages hold. Over tensor ranks: replicated ones. Over data
    ranks: all.
    """
    groups: dict[
        tuple[Axis, Kind, str, tuple[int, int]], list[tuple[RankCoordinates, TensorCopy]]
    ] = {}
    for copy in snapshot.copies:
        place = copy.place
        if place is None:
            continue
        key = (copy.kind, copy.name)
        groups.setdefault(("stage", *key, (place.tensor, place.data)), []).append((place, copy))
        groups.setdefault(("data", *key, (place.stage, place.tensor)), []).append((place, copy))
        if copy.replicated:
            groups.setdefault(("tensor", *key, (place.stage, place.data)), []).append((place, copy))
    rule = _Rule(0.0, on_numbers)
    found = []
    for (axis, kind, name, _), members in groups.items():
        (against, first), *others = sorted(members, key=lambda member: member[0].rank)
        for place, copy in others:
            delta = copies_delta(first, copy, rule)
            if delta is not None:
                found.append(Violation(axis, kind, name, place=place, against=against, delta=delta))
    return sorted(found, key=lambda item: (model_order(item.name), item.place.rank))

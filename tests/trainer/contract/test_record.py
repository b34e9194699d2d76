"""`Record`: frozen, compared by its fields, read from what its annotations say."""

from __future__ import annotations

import copy
import pickle
from typing import Generic, TypeVar

import pytest
from msgspec import field, to_builtins
from msgspec.structs import replace

from trainer.contract.record import Record

T = TypeVar("T")


class Point(Record):
    x: int
    y: int = 0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is below zero")


class Box(Record, Generic[T]):
    item: T


class Tall(Point):
    height: int = 1


def test_a_record_is_a_frozen_value() -> None:
    point = Point(1, names=["a"])
    assert point == Point(1, names=["a"]) and point != Point(1) and point != Tall(1, names=["a"])
    assert hash(Box((1, 2))) == hash(Box((1, 2)))
    for name in ("x", "new"):
        with pytest.raises(AttributeError):
            setattr(point, name, 2)
    assert copy.copy(point) == copy.deepcopy(point) == pickle.loads(pickle.dumps(point)) == point
    assert Point(1).names is not Point(1).names, "a default is made for each"


def test_every_way_to_make_one_checks_it() -> None:
    with pytest.raises(ValueError, match="x is below zero"):
        Point(-1)
    with pytest.raises(ValueError, match="x is below zero"):
        replace(Point(1), x=-1)
    with pytest.raises(TypeError, match="'x'"):
        Point()  # type: ignore[call-arg]


def test_a_record_of_a_record_has_the_fields_of_both() -> None:
    assert to_builtins(Tall(1, height=3)) == {"x": 1, "y": 0, "names": [], "height": 3}

"""`Record`: frozen, compared by its fields, read from what its annotations say."""

from __future__ import annotations

import copy
import pickle
import re
from types import ModuleType
from typing import Generic, TypeVar

import pytest
from msgspec import field, to_builtins
from msgspec.structs import replace

from tr11ops.base import errors as of_the_operation
from trainer.contract import errors as of_the_trainer
from trainer.contract.errors import NEEDS_PERSON, Tr11Error
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


# ----------------------------------------------------------------------------- errors
# The errors of both packages: the tree in each docstring is the tree of the classes, with their
# exit codes.

ENTRY = re.compile(r"^    ( +)([A-Z]\w+)(?:  (\d))?(?: \(.*\))?$", re.MULTILINE)


def classes(module: ModuleType) -> dict[str, type[Tr11Error]]:
    """The errors that a module defines, by name, in its order."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    own = {name: value for name, value in found.items() if value.__module__ == module.__name__}
    return {
        name: value
        for name, value in own.items()
        if issubclass(value, Tr11Error) and value is not Tr11Error
    }


@pytest.mark.parametrize("module", [of_the_operation, of_the_trainer], ids=["operation", "trainer"])
def test_the_docstring_draws_the_tree(module: ModuleType) -> None:
    drawn = [
        (len(indent) // 2, name, int(code or NEEDS_PERSON))
        for indent, name, code in ENTRY.findall(module.__doc__)
    ]
    kinds = classes(module)
    assert [name for _, name, _ in drawn] == list(kinds)
    above: list[str] = []
    for depth, name, code in drawn:
        above[depth - 1 :] = [name]
        parents = [
            parent.__name__ for parent in kinds[name].__mro__[1:] if parent.__name__ in kinds
        ]
        assert (parents[:1] or [None])[0] == (above[depth - 2] if depth > 1 else None), name
        if name != "Refusal":  # whose code is each one's own
            assert kinds[name].exit_code == code, name

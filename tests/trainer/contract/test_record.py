"""`Record` against the library's frozen dataclass: the same class, written later."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, asdict, field, fields, is_dataclass, replace
from typing import ClassVar, Generic, TypeVar

import pytest

from trainer.contract.record import Record

T = TypeVar("T")


class Point(Record):
    x: int
    y: int = 0
    names: list[str] = field(default_factory=list, compare=False)
    count: ClassVar[int] = 7

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x")


class Box(Record, Generic[T]):
    item: T


class Above(Record):
    a: int


class Below(Above):
    b: int = 1


class Told(Record):
    text: str

    def __repr__(self) -> str:
        return f"<{self.text}>"


class Own(Record):
    text: str

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "text", text.upper())


def is_written(kind: type) -> bool:
    return "__dataclass_fields__" in vars(kind)


def test_it_behaves_as_the_library_s() -> None:
    point = Point(1, names=["a"])
    assert (point, hash(point)) == (Point(1, names=["b"]), hash(Point(1)))
    assert point != Point(2) and point != (1, 0)
    assert repr(point) == "Point(x=1, y=0, names=['a'])" and repr(Told("so")) == "<so>"
    assert asdict(replace(point, y=3)) == {"x": 1, "y": 3, "names": ["a"]}
    assert [one.name for one in fields(Point)] == ["x", "y", "names"]
    assert Point(1).names is not Point(1).names, "a default is made for each"
    for change in (lambda: setattr(point, "x", 2), lambda: delattr(point, "x"), lambda: setattr(point, "new", 2)):
        with pytest.raises(FrozenInstanceError):
            change()
    with pytest.raises(ValueError, match="x"):
        Point(-1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]
    match point:
        case Point(x, y):
            assert (x, y) == (1, 0)
    assert Box[int](3) == Box(3)
    assert Own("a").text == "A" and Own("a") == Own("a")
    assert copy.copy(point) == copy.deepcopy(point) == pickle.loads(pickle.dumps(point)) == point


def test_records_of_few_fields_and_of_fields_that_do_not_count() -> None:
    class Nothing(Record):
        pass

    class Half(Record):
        shown: int
        hidden: float = field(default=0.0, repr=False, hash=False)

    assert Nothing() == Nothing() and hash(Nothing()) == hash(()) and repr(Nothing()).endswith("Nothing()")
    assert Half(1) != Half(1, 2.0) and hash(Half(1)) == hash(Half(1, 2.0)) == hash((1,))
    assert repr(Half(1)).endswith("Half(shown=1)")
    assert Half(shown=1, hidden=float("nan")) != Half(shown=1, hidden=float("nan"))


def test_a_field_that_no_one_can_give_is_refused() -> None:
    class Hidden(Record):
        x: int = field(default=0, init=False)

    with pytest.raises(TypeError, match=r"Hidden\.x: a record takes every field, by its place or its name"):
        Hidden()


def test_a_class_is_written_at_its_first_use_and_not_before() -> None:
    class Unused(Record):
        x: int = 0

    class Asked(Record):
        x: int = 0

    assert not is_written(Unused)
    assert is_dataclass(Asked) and is_written(Asked)
    assert not is_dataclass(Record)
    assert Unused() == Unused() and is_written(Unused)


@pytest.mark.parametrize("first", [Above, Below])
def test_a_record_of_a_record_has_the_fields_of_both(first: type) -> None:
    class Upper(Record):
        a: int

    class Lower(Upper):
        b: int = 1

    _ = Upper(1) if first is Above else Lower(1, 2)
    assert asdict(Lower(1, 2)) == {"a": 1, "b": 2} and asdict(Upper(1)) == {"a": 1}
    assert Lower(1, 1) != Upper(1)


def test_what_was_pickled_elsewhere_is_whole(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "where.py").write_text(
        "from trainer.contract.record import Record\nclass One(Record):\n    x: int\n    y: str = 'a'\n"
    )
    make = "import pickle, sys, where; sys.stdout.buffer.write(pickle.dumps([where.One(1), where.One(1)]))"
    read = (
        "import pickle, sys; a, b = pickle.load(sys.stdin.buffer); assert a == b and hash(a) == hash(b); print(a)\n"
        "try: a.x = 2\nexcept AttributeError as error: print(error)"
    )

    def done(code: str, given: bytes = b"") -> bytes:
        path = [str(tmp_path), *sys.path]
        program = f"import sys; sys.path[:] = {path!r}\n{code}"
        return subprocess.run([sys.executable, "-c", program], input=given, capture_output=True, check=True).stdout

    assert done(read, done(make)) == b"One(x=1, y='a')\ncannot assign to field 'x'\n"


def test_threads_that_meet_at_an_unwritten_class_write_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, inside, go_on = [], threading.Event(), threading.Event()

    class Slow(Record):
        x: int

    real = dataclasses._process_class  # type: ignore[attr-defined]

    def slowly(*given):  # type: ignore[no-untyped-def]
        made.append(given[0])
        inside.set()
        assert go_on.wait(300)
        return real(*given)

    monkeypatch.setattr(dataclasses, "_process_class", slowly)
    found: list[Slow] = []
    threads = [threading.Thread(target=lambda n=n: found.append(Slow(n))) for n in range(4)]
    threads[0].start()
    assert inside.wait(300)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(300)
    assert sorted(one.x for one in found) == [0, 1, 2, 3]
    assert made == [Slow]

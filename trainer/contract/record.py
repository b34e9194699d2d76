"""`Record`: a frozen dataclass whose methods are written when it is first used, and not when its module is imported.

    class Node(Record):
        name: str
        jobs: tuple[str, ...] = ()

is what `@dataclass(frozen=True)` makes of the same lines, to type checkers as well. The library compiles six functions
for each class; a command imports hundreds of such classes and uses some, and this was a quarter of the processor time
of `tr11 status`. Here `__init__` alone is compiled, at the first use; the others are the same for every record. A
record of records, a class with an `__init__` of its own, is written at once. Standard library only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

_writing = threading.RLock()
# A process that is forked while another thread writes a class would have half of it, and no one to end the work.
os.register_at_fork(before=_writing.acquire, after_in_parent=_writing.release, after_in_child=_writing.release)


def _write(kind: type[Record]) -> None:
    """Write the methods of a class, once, whichever thread asks for them first; the library finds the fields."""
    with _writing:
        if "_hashed" not in vars(kind):
            dataclass(init=False, repr=False, eq=False)(kind)
            found = fields(kind)
            if "__init__" not in vars(kind):
                kind.__init__ = _initializer(kind, found)  # type: ignore[method-assign]
            kind._compared = _values(one.name for one in found if one.compare)
            kind._hashed = _values(one.name for one in found if (one.compare if one.hash is None else one.hash))


def _initializer(kind: type[Record], found: Iterable[Field[Any]]) -> Any:
    """`__init__` with a parameter for each field."""
    scope: dict[str, Any] = {"__name__": kind.__module__, "_set": object.__setattr__, "_made": MISSING}
    parameters, lines = ["self"], []
    for one in found:
        name, value, default = one.name, one.name, f"_default_{one.name}"
        if not one.init or one.kw_only:
            raise TypeError(f"{kind.__qualname__}.{name}: a record takes every field, by its place or its name")
        if one.default_factory is not MISSING:
            scope[default] = one.default_factory
            parameters.append(f"{name}=_made")
            value = f"{default}() if {name} is _made else {name}"
        elif one.default is not MISSING:
            scope[default] = one.default
            parameters.append(f"{name}={default}")
        else:
            parameters.append(name)
        lines.append(f" _set(self, {name!r}, {value})")
    lines.append(" self.__post_init__()" if hasattr(kind, "__post_init__") else " return None")
    exec(f"def __init__({', '.join(parameters)}):\n" + "\n".join(lines), scope)  # as the library does
    scope["__init__"].__qualname__ = f"{kind.__qualname__}.__init__"
    return scope["__init__"]


def _values(names: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """What gives these attributes of a record as a tuple."""
    wanted = tuple(names)
    return attrgetter(*wanted) if len(wanted) > 1 else lambda record: tuple(getattr(record, name) for name in wanted)


class _Fields:
    """`__dataclass_fields__` of a class not yet written: every function of `dataclasses` asks for it first."""

    def __get__(self, instance: object, kind: type[Record]) -> dict[str, Field[Any]]:
        if kind is Record:
            raise AttributeError("a Record by itself has no fields")
        _write(kind)
        fields: dict[str, Field[Any]] = vars(kind)["__dataclass_fields__"]
        return fields


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record:
    """Base of frozen dataclasses; see the module. `fields`, `replace`, `asdict`, pickling and copying work as ever."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
        _compared: ClassVar[Callable[[Any], tuple[Any, ...]]]
        _hashed: ClassVar[Callable[[Any], tuple[Any, ...]]]
    else:
        __dataclass_fields__ = _Fields()

        def __init__(self, *values, **named):  # found only until the class has one of its own
            _write(type(self))
            type(self).__init__(self, *values, **named)

        def __eq__(self, other):
            kind = type(self)
            return kind._compared(self) == kind._compared(other) if other.__class__ is kind else NotImplemented

        def __hash__(self):
            return hash(type(self)._hashed(self))

        @recursive_repr()
        def __repr__(self):
            shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
            return f"{type(self).__qualname__}({', '.join(shown)})"

        def __setattr__(self, name, value):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")

        def __delattr__(self, name):
            raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __init_subclass__(cls) -> None:
        """Where a class or one below it has, or is going to have, an `__init__`, the one above is not reached."""
        super().__init_subclass__()
        if "__init__" in vars(cls) or any(issubclass(base, Record) and base is not Record for base in cls.__bases__):
            _write(cls)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickled or copied one, perhaps the first of its class in this process."""
        _write(type(self))
        vars(self).update(state)

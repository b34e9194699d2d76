"""`Record`: a frozen dataclass whose methods are written when it is first used, and not when its module is imported.

    class Node(Record):
        name: str
        jobs: tuple[str, ...] = ()

is what `@dataclass(frozen=True)` makes of the same lines, to type checkers as well. The library compiles six functions
for each class; a command imports hundreds of such classes and uses a few, and this was a quarter of the processor time
of `tr11 status`. A record of records, a class with an `__init__` of its own, is written at once. Standard library only.
"""

from __future__ import annotations

import os
import threading
from dataclasses import Field, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

_writing = threading.RLock()
# A process that is forked while another thread writes a class would have half of it, and no one to end the work.
os.register_at_fork(before=_writing.acquire, after_in_parent=_writing.release, after_in_child=_writing.release)


def _write(kind: type[Record]) -> None:
    """Have the library write the methods of a class, once, whichever thread asks for them first."""
    with _writing:
        if "__dataclass_params__" not in vars(kind):
            dataclass(frozen=True)(kind)


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
    else:
        __dataclass_fields__ = _Fields()

        def __init__(self, *values, **named):  # found only until the class has one of its own
            _write(type(self))
            type(self).__init__(self, *values, **named)

    def __init_subclass__(cls) -> None:
        """Where a class or one below it has, or is going to have, an `__init__`, the one above is not reached."""
        super().__init_subclass__()
        if "__init__" in vars(cls) or any(issubclass(base, Record) and base is not Record for base in cls.__bases__):
            _write(cls)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickled or copied one, perhaps the first of its class in this process."""
        _write(type(self))
        vars(self).update(state)

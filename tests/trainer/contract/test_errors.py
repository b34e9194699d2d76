"""The errors of both packages: the tree in each docstring is the tree of the classes, with their
exit codes.
"""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from tr11ops.base import errors as of_the_operation
from trainer.contract import errors as of_the_trainer
from trainer.contract.errors import NEEDS_PERSON, Tr11Error

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

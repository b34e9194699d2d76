"""Rules of the tests themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, and every name that it imports from one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_file_is_imported() -> None:
    """What two files need is in a support module beside them, and fixtures are in a conftest.py or
    in tests/plugins.
    """
    modules = {
        ".".join(path.relative_to(TESTS.parent).with_suffix("").parts): path
        for path in TESTS.rglob("test_*.py")
    }
    assert "tests.test_house" in modules
    wrong = {
        (str(path), name)
        for path in TESTS.rglob("*.py")
        for name in imported(path)
        if name in modules
    }
    assert wrong == set()

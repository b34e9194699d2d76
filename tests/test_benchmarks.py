"""The benchmarks, which the suite does not run, use what there is: each name that they import of
the packages exists.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def bound(statements: list[ast.stmt]) -> Iterator[str]:
    """Names that a module's own statements bind."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.alias):
                yield node.asname or node.name


def is_there(module: str, name: str) -> bool:
    spec = find_spec(module)
    assert spec is not None, module
    if spec.submodule_search_locations and find_spec(f"{module}.{name}"):
        return True
    return spec.origin is not None and name in set(
        bound(ast.parse(Path(spec.origin).read_text()).body)
    )


@pytest.mark.parametrize(
    "name", sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py"))
)
def test_what_a_benchmark_imports_exists(name: str) -> None:
    wanted = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse((FOLDER / name).read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.split(".")[0] in {"tr11ops", "trainer"}
        for alias in node.names
    ]
    assert [entry for entry in wanted if not is_there(*entry)] == []

"""Which file imports which, at its top or inside a function, and the circles that this makes.

An import under `if TYPE_CHECKING:` is none: it is not made when the program runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

Graph = Mapping[str, Set[str]]


class ImportReader(ast.NodeVisitor):
    """The names that a file imports: `a.b` for `import a.b`, and `a.b.c` for `from a.b import c`."""

    def __init__(self) -> None:
        self.at_top: set[str] = set()
        self.in_functions: set[str] = set()
        self._functions = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level:
            raise SystemExit(f"line {node.lineno}: a relative import; name the whole module")
        for alias in node.names:
            self._add(f"{node.module}.{alias.name}")

    def _add(self, name: str) -> None:
        if self._functions:
            self.in_functions.add(name)
        else:
            self.at_top.add(name)


def module_name(path: Path) -> str:
    """`tr11ops/cli/main.py` -> `tr11ops.cli.main`; a package has its folder's name."""
    parts = path.with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def graph(imported: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """Module -> the modules it imports, of those that are keys; an imported name may be something in a module."""
    found: dict[str, set[str]] = {}
    for module, names in imported.items():
        found[module] = set()
        for name in names:
            place = name if name in imported else name.rpartition(".")[0]
            if place in imported and place != module:
                found[module].add(place)
    return found


def circles(imports: Graph) -> Iterator[list[str]]:
    """The groups of modules in which each reaches every other by its imports."""
    below = {module: _reached(imports, module) for module in imports}
    told: set[str] = set()
    for module in sorted(imports):
        if module in below[module] and module not in told:
            circle = sorted(other for other in below[module] if module in below[other])
            told.update(circle)
            yield circle


def _reached(imports: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for module in imports[waiting.pop()]:
            if module not in found:
                found.add(module)
                waiting.append(module)
    return found

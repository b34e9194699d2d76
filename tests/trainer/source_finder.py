"""Where in the source of the trainer something stands: what its linting tests have in common."""

from __future__ import annotations

import ast


class SourceFinder(ast.NodeVisitor):
    """Visits a module. `inside` are the classes and functions around the node that is visited."""

    def __init__(self) -> None:
        self.inside: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node)

    @property
    def place(self) -> str:
        """The whole name of that function; "" at the top of the module."""
        return ".".join(self.inside)

    def visit_inside(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        """Visit what stands in it, its signature and decorators too."""
        self.generic_visit(node)

    def _enter(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.inside.append(node.name)
        self.visit_inside(node)
        self.inside.pop()

"""What stays the same of a document while its values change: the paths of its keys, and the kinds
of its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Shape = dict[str, list[str]]
KINDS = {bool: "boolean", int: "number", float: "number", str: "text", type(None): "null"}


def shape(document: Any) -> Shape:
    """Path -> kinds of value. `a.b` is a key in an object, `a[]` any element of a list."""
    found: dict[str, set[str]] = {}
    for path, kind in _walk(document, ""):
        found.setdefault(path, set()).add(kind)
    return {path: sorted(kinds) for path, kinds in sorted(found.items())}


def lost(pinned: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> list[str]:
    """What a reader of the pinned shape would miss: paths that are gone, and values of another
    kind.
    """
    gone = [f"{path} is gone" for path in pinned if path not in now]
    other = [
        f"{path} is {' or '.join(now[path])}, was {' or '.join(kinds)}"
        for path, kinds in pinned.items()
        if path in now and not set(now[path]) <= set(kinds)
    ]
    return gone + other


def merged(shapes: list[Shape]) -> Shape:
    """The shape of several documents of one format."""
    found: dict[str, set[str]] = {}
    for one in shapes:
        for path, kinds in one.items():
            found.setdefault(path, set()).update(kinds)
    return {path: sorted(kinds) for path, kinds in sorted(found.items())}


def _walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        yield path or ".", "object"
        for key, inner in value.items():
            yield from _walk(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        yield path or ".", "list"
        for inner in value:
            yield from _walk(inner, f"{path}[]")
    else:
        yield path or ".", KINDS[type(value)]

"""How two resolved cards differ, as a person reads it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str = ""
) -> Iterator[str]:
    """`section.key: old -> new` for every value that differs, by name."""
    for key in sorted({*before, *after}):
        old, new, name = before.get(key), after.get(key), f"{path}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{name}.")
        elif old != new:
            yield f"{name}: {_value(old)} -> {_value(new)}"


def _value(value: Any) -> str:
    if value is None:
        text = "none"
    else:
        text = " ".join(str(value).split())
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."

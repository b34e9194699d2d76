"""Sizes as people read them, the same in both packages."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes in binary units: `512 B`, `327.8 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            if unit == "B":
                return f"{count:.0f} {unit}"
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"

"""An error in words that are the same each time it comes."""

from __future__ import annotations

import re


def signature(text: str) -> str:
    """An error without what changes from one time to the next: numbers, addresses, paths, node
    names' numbers.
    """
    plain = re.sub(r"0x[0-9a-fA-F]+|\S*/\S+", "~", text)
    return re.sub(r"\s+", " ", re.sub(r"\d+", "#", plain)).strip()[:160].lower()

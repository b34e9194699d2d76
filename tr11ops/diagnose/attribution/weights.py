"""How sure each kind of conclusion is: figures fitted on labelled logs, kept as data beside this
file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("weights.toml")


@cache
def weights() -> Mapping[str, float]:
    """Confidence by rule: how often its conclusion is right, 0 to 1."""
    return {name: float(entry["confidence"]) for name, entry in read_weights().items()}


@cache
def read_weights(file: Path = FILE) -> Mapping[str, Mapping[str, float]]:
    """For each rule `prior`, `cases` and `right` of the fit, and `confidence`, which came of them."""
    found: Mapping[str, Mapping[str, float]] = tomllib.loads(file.read_text(encoding="utf-8"))
    return found

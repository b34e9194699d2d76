"""What a base install does without, and only tr11's own trainer needs; whether it is installed here.

Nothing is imported for it: torch alone takes seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib import metadata

from tr11ops.base.errors import Refusal

EXTRA = 'pip install "tr11[trainer]"'
"""What brings all of them."""

TRAINING = ("torch", "deepspeed", "numpy", "tokenizers")
READING_CHECKPOINTS = ("torch", "numpy")
MAKING_DATA = ("numpy", "tokenizers")
MEASURING_NODES = ("torch",)


def missing(packages: Iterable[str]) -> tuple[str, ...]:
    """Those that this interpreter does not find."""
    return tuple(name for name in packages if importlib.util.find_spec(name) is None)


def require(packages: Iterable[str], what: str, install: str = EXTRA) -> None:
    """Raise Refusal where one of them is missing, of which `what` has need: words that begin the
    sentence, such as `tr11 eval`. `install` is what to type then.
    """
    absent = missing(packages)
    if absent:
        raise Refusal(f"{what} needs {', '.join(absent)}, not installed here; type: {install}")


def trainer_line() -> str:
    """What there is of our own trainer's packages, with their versions, as one line."""
    absent = missing(TRAINING)
    if absent:
        return f"operations alone: no {', '.join(absent)}; {EXTRA} brings tr11's own trainer"
    return ", ".join(f"{name} {_version(name)}" for name in TRAINING)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of an unknown version"  # found in a folder that PYTHONPATH names

"""Finds the files that ship beside the code: slurm/, runbooks/ and cron/, in a checkout or in an
installed wheel.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_root() -> Path:
    """The folder that holds slurm/, runbooks/ and cron/; $TR11_SHIPPED for the set-up lines of a
    card.
    """
    return shipped("slurm").parent


def shipped(*parts: str) -> Path:
    """Path of a shipped file or folder, e.g. `shipped("slurm", "train.sbatch.j2")`.

    Raises FileNotFoundError when neither the wheel nor the checkout holds it.
    """
    places = (_PACKAGE / "shipped", _PACKAGE.parent)
    for place in places:
        path = place.joinpath(*parts)
        if path.exists():
            return path
    name = "/".join(parts)
    raise FileNotFoundError(
        f"{name} is not shipped with this installation of tr11; install it again"
    )


def read_shipped(*parts: str) -> str:
    """Text of a shipped file (UTF-8). Raises FileNotFoundError as `shipped` does."""
    return shipped(*parts).read_text(encoding="utf-8")

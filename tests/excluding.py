"""Putting a node on a run's list of exclusions, as most tests do it."""

from __future__ import annotations

from typing import Any

from tr11ops.rundir import exclusions
from tr11ops.rundir.exclusion import Exclusion, ExclusionLimit
from tr11ops.rundir.paths import RunDirectory


def exclude(
    directory: RunDirectory,
    node: str,
    *,
    days: float | None,
    limit: ExclusionLimit | None = None,
    forced: bool = False,
    **known: Any,
) -> bool:
    """Put it on the list; `known` are fields of Exclusion."""
    asked = Exclusion(node, **known)
    return exclusions.exclude(directory, asked, days=days, limit=limit, forced=forced)

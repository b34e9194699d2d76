"""Does each GPU have all its PCIe lanes? (The generation is no sign: an idle GPU lowers it to save power.)"""

from __future__ import annotations

from tr11ops.agent.health.base import Answer, Outcome, System, Unanswered, Wanted, listed
from tr11ops.agent.health.nvidia import number, query

_WIDTH, _MOST = "pcie.link.width.current", "pcie.link.width.max"


def check(system: System, wanted: Wanted) -> Answer:
    """Bad when a GPU has fewer lanes than another of the node; a warning when all have fewer than they could."""
    rows = query(system, ["index", _WIDTH, _MOST], wanted.seconds)
    widths = {row["index"]: width for row in rows if (width := number(row[_WIDTH])) is not None}
    if not widths:
        raise Unanswered("these GPUs do not say")
    widest = max(widths.values())
    narrow = [f"GPU {index}: x{width}" for index, width in widths.items() if width < widest]
    if narrow:
        return Outcome.BAD, f"PCIe lanes are missing (others have x{widest}): {listed(narrow)}"
    most = max((number(row[_MOST]) or 0 for row in rows), default=0)
    if widest < most:
        return Outcome.WARNING, f"all GPUs have x{widest} of x{most} PCIe lanes"
    return Outcome.FINE, f"x{widest} on all GPUs"

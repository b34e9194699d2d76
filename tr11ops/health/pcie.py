"""Does each GPU have all its PCIe lanes? (The generation is no sign: an idle GPU lowers it to save
power.)
"""

from __future__ import annotations

from tr11ops.base.errors import Unanswered
from tr11ops.base.nvidia import number, query
from tr11ops.base.units import first_few
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

_WIDTH, _MOST = "pcie.link.width.current", "pcie.link.width.max"


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when a GPU has fewer lanes than another of the node; a warning when all have fewer than
    they could.
    """
    rows = query(system, ["index", _WIDTH, _MOST], wanted.seconds)
    widths = {row["index"]: width for row in rows if (width := number(row[_WIDTH])) is not None}
    if not widths:
        raise Unanswered("these GPUs do not say")
    widest = max(widths.values())
    narrow = [f"GPU {index}: x{width}" for index, width in widths.items() if width < widest]
    if narrow:
        return (
            CheckOutcome.BAD,
            f"PCIe lanes are missing (others have x{widest}): {first_few(narrow)}",
        )
    most = max((number(row[_MOST]) or 0 for row in rows), default=0)
    if widest < most:
        return CheckOutcome.WARNING, f"all GPUs have x{widest} of x{most} PCIe lanes"
    return CheckOutcome.FINE, f"x{widest} on all GPUs"

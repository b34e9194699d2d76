"""Have GPU memory errors that could not be corrected been counted since the driver was loaded?"""

from __future__ import annotations

from tr11ops.base.errors import Unanswered
from tr11ops.base.nvidia import number, query
from tr11ops.base.units import first_few
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

_COUNT = "ecc.errors.uncorrected.volatile.total"


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad with one error or more: the GPU gives wrong numbers or kills its process, until it is
    reset.
    """
    rows = query(system, ["index", "pci.bus_id", _COUNT], wanted.seconds)
    counts = [(row, number(row[_COUNT])) for row in rows]
    bad = [f"GPU {row['index']} ({row['pci.bus_id']}): {count}" for row, count in counts if count]
    bad += [
        f"GPU {row['index']}: {row[_COUNT]}" for row, _ in counts if "reset" in row[_COUNT].lower()
    ]
    if bad:
        return CheckOutcome.BAD, f"uncorrected memory errors: {first_few(bad)}"
    if not any(count is not None for _, count in counts):
        raise Unanswered("these GPUs do not count memory errors (ECC off or not there)")
    return CheckOutcome.FINE, "no uncorrected memory errors"

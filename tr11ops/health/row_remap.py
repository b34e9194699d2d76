"""Does a GPU wait for a reset to put spare memory in place of broken rows (or pages, before
Ampere)?
"""

from __future__ import annotations

from tr11ops.base.errors import Unanswered
from tr11ops.base.nvidia import query
from tr11ops.base.units import first_few
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

_PENDING, _FAILED, _PAGES = (
    "remapped_rows.pending",
    "remapped_rows.failure",
    "retired_pages.pending",
)
_YES = {"yes", "1"}
_NO = {"no", "0"}


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when a remapping is pending or has failed; older GPUs retire pages instead."""
    try:
        rows = query(
            system, ["gpu_bus_id", _PENDING, _FAILED], wanted.seconds, what="remapped-rows"
        )
    except Unanswered:
        rows = []  # an old driver; the question below says what is known
    answers = {value.lower() for row in rows for value in (row[_PENDING], row[_FAILED])}
    if not answers & (_YES | _NO):
        rows = [
            {"gpu_bus_id": row["pci.bus_id"], _PENDING: row[_PAGES], _FAILED: "no"}
            for row in query(system, ["pci.bus_id", _PAGES], wanted.seconds)
        ]
        answers = {row[_PENDING].lower() for row in rows}
    failed = [row["gpu_bus_id"] for row in rows if row[_FAILED].lower() in _YES]
    pending = [row["gpu_bus_id"] for row in rows if row[_PENDING].lower() in _YES]
    if failed:
        return (
            CheckOutcome.BAD,
            f"row remapping failed, the GPU must be replaced: {first_few(failed)}",
        )
    if pending:
        return CheckOutcome.BAD, f"memory repair waits for a GPU reset: {first_few(pending)}"
    if not answers & _NO:
        raise Unanswered("these GPUs do not say")
    return CheckOutcome.FINE, "no repair pending"

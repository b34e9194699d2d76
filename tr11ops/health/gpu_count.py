"""Are all GPUs there? A GPU that fell off the bus is missing from the list, or makes nvidia-smi
itself fail.
"""

from __future__ import annotations

from tr11ops.base.errors import Unanswered
from tr11ops.base.nvidia import LOST, list_gpus
from tr11ops.base.units import counted
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when fewer GPUs answer than the run asks for; slices of divided ones count each."""
    try:
        found = len(list_gpus(system, wanted.seconds))
    except Unanswered as error:
        if LOST.search(str(error)):
            return CheckOutcome.BAD, str(error)
        raise
    if found < wanted.gpus:
        return (
            CheckOutcome.BAD,
            f"{found} of {counted(wanted.gpus, 'GPU')} answer{'s' if found == 1 else ''}",
        )
    return CheckOutcome.FINE, counted(found, "GPU")

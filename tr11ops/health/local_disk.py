"""Is there room in this node's own temporary folder, and can it be written? (A failing disk turns read-only.)"""

from __future__ import annotations

import errno

from tr11ops.base.units import size
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

LEAST_BYTES = 64 << 20
COMFORTABLE_BYTES = 1 << 30


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when it is read-only, broken or full; a warning when less than 1 GiB is free."""
    place = str(wanted.temporary)
    space = system.space(place)
    if space.free < LEAST_BYTES:
        return CheckOutcome.BAD, f"{place} is full: {size(space.free)} free of {size(space.total)}"
    try:
        system.write_probe(place)
    except OSError as error:
        broken = error.errno in {errno.EROFS, errno.EIO, errno.ENOSPC}
        return (
            CheckOutcome.BAD if broken else CheckOutcome.WARNING,
            f"{place} cannot be written: {error.strerror or error}",
        )
    if space.free < COMFORTABLE_BYTES:
        return CheckOutcome.WARNING, f"{place}: {size(space.free)} free of {size(space.total)}"
    return CheckOutcome.FINE, f"{place}: {size(space.free)} free"

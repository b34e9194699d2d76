"""Is there room in this node's own temporary folder, and can it be written? (A failing disk turns read-only.)"""

from __future__ import annotations

import errno

from tr11ops.agent.health.base import Answer, Outcome, System, Wanted, size

LEAST_BYTES = 64 << 20
COMFORTABLE_BYTES = 1 << 30


def check(system: System, wanted: Wanted) -> Answer:
    """Bad when it is read-only, broken or full; a warning when less than 1 GiB is free."""
    place = str(wanted.temporary)
    space = system.space(place)
    if space.free < LEAST_BYTES:
        return Outcome.BAD, f"{place} is full: {size(space.free)} free of {size(space.total)}"
    try:
        system.write_probe(place)
    except OSError as error:
        broken = error.errno in {errno.EROFS, errno.EIO, errno.ENOSPC}
        return Outcome.BAD if broken else Outcome.WARNING, f"{place} cannot be written: {error.strerror or error}"
    if space.free < COMFORTABLE_BYTES:
        return Outcome.WARNING, f"{place}: {size(space.free)} free of {size(space.total)}"
    return Outcome.FINE, f"{place}: {size(space.free)} free"

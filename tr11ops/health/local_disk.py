"""Is there room in the folder for temporary files, and can it be written? (A failing disk turns
read-only.)
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tr11ops.base.units import size
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

LEAST_BYTES = 64 << 20
COMFORTABLE_BYTES = 1 << 30


def exported_folder(environment: Mapping[str, str]) -> Path:
    """Where the job's environment wants temporary files (TMPDIR), be it usable or not; else the
    system's own place.

    Python's `tempfile` goes to another place, and says nothing, where that folder is broken: just
    what is asked here.
    """
    named = next(
        (environment[name] for name in ("TMPDIR", "TEMP", "TMP") if environment.get(name)), ""
    )
    if named:
        return Path(named)
    return Path(tempfile.gettempdir())


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when it is read-only, broken or full; a warning when less than 1 GiB is free."""
    place = str(wanted.temporary)
    try:
        space = system.space(place)
    except FileNotFoundError:
        return (
            CheckOutcome.WARNING,
            f"{place} (TMPDIR) is not there: programs put temporary files elsewhere",
        )
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

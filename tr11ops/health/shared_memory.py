"""Is there room in /dev/shm? What killed workers of ours left there is removed first."""

from __future__ import annotations

import re
from contextlib import suppress

from tr11ops.base.units import counted, size
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

PLACE = "/dev/shm"
LEAST_BYTES = 64 << 20
BYTES_PER_WORKER = 128 << 20
SETTLED_SECONDS = 60.0  # a younger file may be one that its maker is about to map
# the files that torch, NCCL, DeepSpeed and Python's multiprocessing make there
OURS = re.compile(
    r"torch_\d+_\d+_\d+|nccl-[A-Za-z0-9]{6}|shm_(allreduce|gather|reduce)\w*|\d+_shm_\w+"
    r"|psm_[0-9a-f]+|sem\.mp-[\w-]+|pymp-[\w-]+|__KMP_REGISTERED_LIB_\d+(_\d+)?"
)


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when others have filled it; a warning when the workers may not have enough. Sweeps our
    own stale files.
    """
    swept = sweep(system)
    space = system.space(PLACE)
    cleaned = ""
    if swept:
        cleaned = f"; {swept} stale files of ours removed"
    told = f"{size(space.free)} free of {size(space.total)}{cleaned}"
    if space.free < LEAST_BYTES and space.free < space.total // 10:
        return CheckOutcome.BAD, f"{PLACE} is full: {told}"
    if space.free < wanted.workers * BYTES_PER_WORKER:
        return (
            CheckOutcome.WARNING,
            f"{PLACE} is small for {counted(wanted.workers, 'worker')}: {told}",
        )
    return CheckOutcome.FINE, told


def sweep(system: System) -> int:
    """Remove this user's files of known makers that no process uses; returns how many."""
    removed = 0
    for segment in system.segments(OURS):
        if segment.age >= SETTLED_SECONDS:
            with suppress(FileNotFoundError):  # another agent on the same machine was faster
                system.remove_segment(segment.name)
                removed += 1
    return removed

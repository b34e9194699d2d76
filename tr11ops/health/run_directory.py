"""Can this node write to the run directory? A node that lost the shared file system cannot train."""

from __future__ import annotations

import errno

from tr11ops.base.errors import Unanswered
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

SLOW_SECONDS = 5.0
# what one node has alone; a full disk or a missing right is everyone's trouble, and no fault of the
# node
_OF_THE_NODE = {
    errno.EROFS,
    errno.ESTALE,
    errno.EIO,
    errno.ENOENT,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
    errno.ENODEV,
    errno.ESHUTDOWN,
}


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when the node has lost the file system; a warning when it is full, not ours, or slow."""
    if wanted.folder is None:
        raise Unanswered("no folder of the run directory was given")
    try:
        took = system.write_probe(str(wanted.folder))
    except OSError as error:
        said = f"{error.filename or wanted.folder}: {error.strerror or error}"
        return CheckOutcome.BAD if error.errno in _OF_THE_NODE else CheckOutcome.WARNING, said
    if took > SLOW_SECONDS:
        return CheckOutcome.WARNING, f"a small file took {took:.0f} s to write"
    return CheckOutcome.FINE, f"written in {1000 * took:.0f} ms"

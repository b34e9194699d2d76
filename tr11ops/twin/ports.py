"""Free TCP ports for a twin, safe against other twins that start at the same moment."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from tr11ops.base.errors import TwinError

BLOCK = 64  # ports are claimed in blocks of this size
FIRST_BLOCK = 20_032 // BLOCK
# below the range from which Linux takes ports for outgoing connections
LAST_BLOCK = 32_704 // BLOCK


def is_free(port: int) -> bool:
    """True when no one listens on `port`, on any interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # connections in TIME_WAIT do not count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _claim(block: int) -> socket.socket | None:
    """The block's lock, or None when another start holds it: an abstract socket, which ends with
    its process.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0tr11-twin-ports-{block}")
    except OSError:
        lock.close()
        return None
    return lock


@contextlib.contextmanager
def claimed_ports(count: int, beside_twins: bool = False) -> Iterator[int]:
    """The first of `count` consecutive free ports; while the context is open no other twin takes
    them.

    Leave the context when the daemons listen. `beside_twins`: for something else than a twin, from
    the other end: a twin's controller that is being restarted does not listen for a moment, and
    finds its port again. Raises TwinError when there is no such range.
    """
    blocks = -(-count // BLOCK)
    starts = range(FIRST_BLOCK, LAST_BLOCK - blocks + 2)
    for start in reversed(starts) if beside_twins else starts:
        with contextlib.ExitStack() as held:
            locks = [_claim(block) for block in range(start, start + blocks)]
            for lock in locks:
                if lock is not None:
                    held.enter_context(lock)
            first = start * BLOCK
            if None not in locks and all(is_free(port) for port in range(first, first + count)):
                yield first
                return
    raise TwinError(
        f"no {count} free TCP ports in a row between {FIRST_BLOCK * BLOCK} and {(LAST_BLOCK + 1) * BLOCK - 1}: "
        "end other twins (tr11 twin down) or what listens there (ss -ltn)"
    )

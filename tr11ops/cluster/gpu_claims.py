"""Who has which GPU of this machine: a claim that lives as long as a process holds it, seen by
every user.

A claim is the name of a socket in the kernel's own list (Linux' abstract names): a name is had
once, dies with the last process that has the descriptor, and leaves no file. It stands between all
schedulers' folders, users and foreground trainings of one machine (network namespace).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from contextlib import ExitStack


def claim(uuid: str) -> socket.socket | None:
    """The claim on a GPU, to be kept open; None where another process has it. Raises OSError for
    anything else.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(f"\0tr11-gpu-{uuid}")
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return held


def claim_free(uuids: Iterable[str]) -> dict[str, socket.socket]:
    """Claims on those that no process has, by UUID. The caller closes what it does not need."""
    with ExitStack() as stack:
        found = {}
        for uuid in uuids:
            held = claim(uuid)
            if held is not None:
                found[uuid] = stack.enter_context(held)
        stack.pop_all()
        return found

"""`python -m trainer.data.worker PARENT`: one data worker. Reads samples for the rank that started
it.

It is a program of its own, not a fork: it inherits no thread, no lock and no accelerator. It ends
when its rank ends, however that happens: the end of its input says so, and if some other process
holds the pipe open, the parent's number.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import sys
import threading
import time
from typing import BinaryIO

import numpy as np

from trainer.contract.errors import DataError
from trainer.data.dataset import SampleSource, read_rows
from trainer.data.sources import PlannedSource

LENGTH = struct.Struct("<Q")
# ticket, place of the source among the planned ones, how many int64 numbers follow
REQUEST = struct.Struct("<QII")
REPLY = struct.Struct("<QIQ")  # ticket, what follows, how many bytes of it
ROWS = 0  # samples, int64
FAULT = 1  # the text of a DataError, UTF-8

# What asks a rank to save and leave reaches its process group; the rank needs its data until it has
# done so. Workers are started with these blocked, and ignore them as soon as they run.
LEFT_TO_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


PARENT_CHECK_SECONDS = 1.0


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests, in their order. A source is opened when it is first asked for.

    Raises EOFError when the rank has closed the pipe, or is gone.
    """
    plans: list[PlannedSource] = list(
        pickle.loads(_read(requests, LENGTH.unpack(_read(requests, LENGTH.size))[0]))
    )
    opened: dict[int, SampleSource] = {}
    while True:
        ticket, place, count = REQUEST.unpack(_read(requests, REQUEST.size))
        numbers = np.frombuffer(_read(requests, 8 * count), dtype="<i8")
        try:
            if place not in opened:
                opened[place] = plans[place].open()
            kind, payload = ROWS, read_rows(opened[place], numbers).tobytes()
        except (DataError, OSError, IndexError) as error:
            kind, payload = FAULT, " ".join(f"{plans[place].name} data: {error}".split()).encode()
        replies.write(REPLY.pack(ticket, kind, len(payload)) + payload)
        replies.flush()


def _read(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(0)


def main() -> None:
    """Serve on the standard streams; what else is printed goes to the standard error."""
    for number in LEFT_TO_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_THE_RANK)
    threading.Thread(target=_leave_with, args=(int(sys.argv[1]),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(os.fdopen(0, "rb", buffering=1 << 16), replies)
    os._exit(0)  # no clean-up is owed, and none may hang


if __name__ == "__main__":
    main()

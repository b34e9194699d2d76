"""The bytes between a rank and its data workers: requests one way, replies the other, each after a fixed header.

The first message to a worker is a pickle of its planned sources, by name, after its length.
"""

from __future__ import annotations

import signal
import struct

LENGTH = struct.Struct("<Q")
REQUEST = struct.Struct("<QII")  # ticket, place of the source among the planned ones, how many int64 numbers follow
REPLY = struct.Struct("<QIQ")  # ticket, what follows, how many bytes of it
ROWS = 0  # samples, int64
FAULT = 1  # the text of a DataError, UTF-8

# What asks a rank to save and leave reaches its process group; the rank needs its data until it has done so.
# Workers are started with these blocked, and ignore them as soon as they run.
LEFT_TO_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

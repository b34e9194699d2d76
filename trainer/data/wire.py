"""The bytes between a rank and its data workers: requests one way, replies the other, each after a fixed header.

The first message to a worker is a pickle of its planned sources, by name, after its length.
"""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<Q")
REQUEST = struct.Struct("<QII")  # ticket, place of the source among the planned ones, how many int64 numbers follow
REPLY = struct.Struct("<QIQ")  # ticket, what follows, how many bytes of it
ROWS = 0  # samples, int64
FAULT = 1  # the text of a DataError, UTF-8

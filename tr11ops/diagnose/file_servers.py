"""What a client of a file system tells of the next time. Pure.

A server that drops a client takes it back by itself, mostly in seconds. Where the client's own log
is there, a later line says so. An error that the server's own disks gave comes again until they are
repaired.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tr11ops.diagnose.order import is_before
from tr11ops.diagnose.sighting import Sighting
from tr11ops.diagnose.signature import Restart

# their own words, in the log of a node's kernel
_CLIENTS = frozenset({"storage-lustre", "storage-client"})
BACK = "storage-back"
_PASSES = re.compile(r"[Nn]o space left|Errno 28\b|ENOSPC|[Dd]isk (?:is )?full|not responding")
# a file that another one replaced meanwhile, as who opens it anew sees; or an export that is gone for all
_STALE = re.compile(r"OSError: \[Errno 116\]")
SEVERAL = 2  # processes that say so
# EIO, ENOSPC, EROFS, EDQUOT
_SERVERS_OWN = re.compile(r"operation \w+ to node \S+ failed: rc = -(?:5|28|30|122)\b")


def helps_where_dropped(told: Sequence[Sighting], sightings: Sequence[Sighting]) -> Restart | None:
    """PLAIN where a server took the client back, UNKNOWN where its client does not say so; None
    where no client speaks and no error means that it was dropped.

    `told`: the lines of the first cause. `sightings`: all of the launch.
    """
    back = [one for one in sightings if one.signature.id == BACK]
    if told and _PASSES.search(told[0].text) and any(is_before(told[0], one) for one in back):
        return Restart.PLAIN
    if told and _STALE.search(told[0].text) and len({one.origin.writer for one in told}) < SEVERAL:
        return Restart.UNKNOWN
    clients = [one for one in told if one.signature.id in _CLIENTS]
    if any(_SERVERS_OWN.search(one.text) for one in clients):
        return Restart.CHANGE
    if not clients:
        said = [one.signature.helps for one in told if one.signature.helps is not None]
        decided = [helps for helps in said if helps is not Restart.UNKNOWN]
        return next(iter([*decided, *said]), None)
    if any(is_before(clients[-1], one) for one in back):
        return Restart.PLAIN
    return Restart.UNKNOWN

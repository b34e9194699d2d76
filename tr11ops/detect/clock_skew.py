"""Clocks differ between machines: deadlines and the order of events cannot be trusted, least of all
leases.

Ages are judged by the run's clock, whatever is wrong here: see observe/clock.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import known
from tr11ops.base.units import duration
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.without_node import exclude_command, start_again
from tr11ops.observe import derived
from tr11ops.observe.clock import skews
from tr11ops.observe.snapshot import Snapshot

BOUND = "`watch.clock_skew_seconds` (30)"
SEVERITIES = "WARNING"
NAME = "clock-skew"
NEEDS = ("operation.clocks", "clock_ahead")

RECENT_SECONDS = derived.HOUR  # an older file may be a copy, with the time of the copying


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING for each host whose writes and the file system's time of them differ by over
    watch.clock_skew_seconds.

    Also for this machine's own clock, in both directions. Only files of the last hour count. A host
    is behind only if all its files say so, since one of them may have been written slowly.
    """
    bound = snapshot.run.watch.clock_skew_seconds
    recent = [
        entry
        for entry in known(snapshot.operation.clocks, ())
        if snapshot.time - entry.stamped <= RECENT_SECONDS
    ]
    nodes = {node.name for node in known(snapshot.nodes, ())}
    for host, skew in sorted(skews(recent, bound).items(), key=lambda pair: -abs(pair[1])):
        entry = next(entry for entry in recent if entry.host == host)
        yield Finding(
            NAME,
            Severity.WARNING,
            f"the clock of {host} is {_signed(skew, 'ahead of')} the file system's",
            subject=host,
            identity=(host,),
            evidence=(f"{entry.what}: {host} wrote {_signed(entry.written - entry.stamped)}",),
            fix=exclude_command(snapshot, host, "its clock is wrong") if host in nodes else "",
            then=start_again(snapshot, host),
        )
    own = known(snapshot.clock_ahead, 0.0)
    if abs(own) > bound:
        yield Finding(
            NAME,
            Severity.WARNING,
            f"this machine's clock is {_signed(own, 'ahead of')} the run's: ages are shown by the run's clock",
            subject="here",
            identity=("this machine",),
            evidence=("what was written here meanwhile carries the wrong time",),
        )


def _signed(seconds: float, ahead: str = "ahead") -> str:
    return f"{duration(abs(seconds))} {ahead if seconds > 0 else 'behind'}"

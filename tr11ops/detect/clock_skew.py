"""Clocks differ between machines: ages, deadlines and the order of events cannot be trusted, least of all leases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.operation import ClockReading
from tr11ops.snapshot import Snapshot, known
from tr11ops.units import duration

NAME = "clock-skew"
NEEDS = ("clocks",)

RECENT_SECONDS = signs.HOUR  # an older file may be a copy, with the time of the copying


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING for each host whose writes and the file system's time of them differ by over watch.clock_skew_seconds.

    Also when files are newer than this machine's own time by as much: then its own clock is behind. Only files of the
    last hour count. A host is behind only if all its files say so, since one of them may have been written slowly.
    """
    bound = snapshot.run.operation.clock_skew_seconds
    recent = [entry for entry in known(snapshot.clocks, ()) if snapshot.time - entry.stamped <= RECENT_SECONDS]
    by_host: dict[str, list[ClockReading]] = {}
    for entry in recent:
        by_host.setdefault(entry.host, []).append(entry)
    wrong = {host: skew for host, entries in by_host.items() if (skew := skew_of(entries)) and abs(skew) > bound}
    for host, skew in sorted(wrong.items(), key=lambda pair: -abs(pair[1])):
        entry = by_host[host][0]
        yield Finding(
            NAME,
            Severity.WARNING,
            f"the clock of {host} is {_signed(skew, 'ahead of')} the file system's",
            subject=host,
            identity=(host,),
            evidence=(f"{entry.what}: {host} wrote {_signed(entry.written - entry.stamped)}",),
        )
    ahead = median([entry.stamped for entry in recent] or [snapshot.time]) - snapshot.time
    if ahead > bound:
        yield Finding(
            NAME,
            Severity.WARNING,
            f"this machine's clock is {duration(ahead)} behind the file system's: every age shown is wrong",
            subject="here",
            identity=("this machine",),
            evidence=(f"{len(recent)} files of the run are newer than now",),
        )


def skew_of(entries: Iterable[ClockReading]) -> float:
    """How far a host's clock is ahead, in seconds (behind: below zero): the least of what its files say."""
    return min((entry.written - entry.stamped for entry in entries), key=abs)


def _signed(seconds: float, ahead: str = "ahead") -> str:
    return f"{duration(abs(seconds))} {ahead if seconds > 0 else 'behind'}"

"""Is the node's memory free before the workers start?"""

from __future__ import annotations

from tr11ops.base.units import size
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

BAD_SHARE, DOUBTFUL_SHARE = 0.05, 0.25


def available(meminfo: str) -> tuple[int, int]:
    """(available, total) bytes, from the text of /proc/meminfo. Raises KeyError when it says
    neither.
    """
    values = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    return values["MemAvailable"], values["MemTotal"]


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad below 5 % of the memory, a warning below 25 %: something else lives here."""
    del wanted
    free, total = available(system.read("/proc/meminfo"))
    told = f"{size(free)} of {size(total)} available"
    if free < BAD_SHARE * total:
        return CheckOutcome.BAD, told
    return (CheckOutcome.WARNING if free < DOUBTFUL_SHARE * total else CheckOutcome.FINE), told

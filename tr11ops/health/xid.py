"""What did the NVIDIA driver write to the kernel log? `Xid` lines that mean broken hardware, not a
faulty program.
"""

from __future__ import annotations

import re

from tr11ops.base.errors import Unanswered
from tr11ops.base.units import first_few
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

RECENT_SECONDS = 86400.0
HARDWARE = {
    48: "double-bit memory error",
    62: "halted micro-controller",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GPU system processor does not answer",
    120: "GPU system processor failed",
    121: "chip-to-chip link error",
    136: "link training failed",
    140: "uncorrected memory error",
    143: "GPU initialisation failed",
}  # NVIDIA, "Xid errors": the ones whose advice is to reset, to diagnose, or to replace
_LINE = re.compile(r"^\[\s*(\d+\.\d+)\].*NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)$")


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad with a hardware Xid within a day; a warning with an older one, for the node may have been
    repaired since.
    """
    try:
        output = system.command(["dmesg", "--kernel"], wanted.seconds)
    except FileNotFoundError:
        raise Unanswered("there is no dmesg on this node") from None
    if output.status != 0:
        raise Unanswered(f"the kernel log may not be read: {' '.join(output.error.split())[:120]}")
    up = float(system.read("/proc/uptime").split()[0])
    recent: list[str] = []
    old: list[str] = []
    programs = 0
    for line in output.text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        number = int(match[3])
        if number not in HARDWARE:
            programs += 1
            continue
        told = f"Xid {number} ({HARDWARE[number]}) on {match[2]}"
        (recent if up - float(match[1]) <= RECENT_SECONDS else old).append(told)
    if recent:
        return CheckOutcome.BAD, first_few(dict.fromkeys(recent))
    if old:
        return CheckOutcome.WARNING, f"more than a day ago: {first_few(dict.fromkeys(old))}"
    return CheckOutcome.FINE, f"no hardware Xid ({programs} of programs)" if programs else "no Xid"

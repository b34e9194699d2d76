"""The checks of a node's GPUs, by nvidia-smi and the kernel's log."""

from __future__ import annotations

import re

from tr11ops.base.errors import Unanswered
from tr11ops.base.nvidia import INVALID_FIELD, LOST, ask, list_gpus, number, query, words_of
from tr11ops.base.units import counted, first_few
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System
from trainer.contract.units import shortened


# ----------------------------------------------------------------------------- are all GPUs there?
def check_gpu_count(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when fewer GPUs answer than the run asks for; slices of divided ones count each."""
    try:
        found = len(list_gpus(system, wanted.seconds))
    except Unanswered as error:
        if LOST.search(str(error)):
            return CheckOutcome.BAD, str(error)
        raise
    if found < wanted.gpus:
        return (
            CheckOutcome.BAD,
            f"{found} of {counted(wanted.gpus, 'GPU')} answer{'s' if found == 1 else ''}",
        )
    return CheckOutcome.FINE, counted(found, "GPU")


# ----------------------------------------------------------------------------- memory errors
_UNCORRECTED = "ecc.errors.uncorrected.volatile.total"


def check_gpu_memory(system: System, wanted: NodeRequirements) -> Answer:
    """Bad with one error or more: the GPU gives wrong numbers or kills its process, until it is
    reset.
    """
    rows = query(system, ["index", "pci.bus_id", _UNCORRECTED], wanted.seconds)
    counts = [(row, number(row[_UNCORRECTED])) for row in rows]
    bad = [f"GPU {row['index']} ({row['pci.bus_id']}): {count}" for row, count in counts if count]
    bad += [
        f"GPU {row['index']}: {row[_UNCORRECTED]}"
        for row, _ in counts
        if "reset" in row[_UNCORRECTED].lower()
    ]
    if bad:
        return CheckOutcome.BAD, f"uncorrected memory errors: {first_few(bad)}"
    if not any(count is not None for _, count in counts):
        raise Unanswered("these GPUs do not count memory errors (ECC off or not there)")
    return CheckOutcome.FINE, "no uncorrected memory errors"


# ---------------------------------------------------------------------------- repairs of the memory
_PENDING = "remapped_rows.pending"
_FAILED = "remapped_rows.failure"
_PAGES = "retired_pages.pending"
_YES = {"yes", "1"}
_NO = {"no", "0"}


def check_row_remap(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when a remapping is pending or has failed; older GPUs retire pages instead."""
    try:
        rows = query(
            system, ["gpu_bus_id", _PENDING, _FAILED], wanted.seconds, what="remapped-rows"
        )
    except Unanswered:
        rows = []  # an old driver; the question below says what is known
    answers = {value.lower() for row in rows for value in (row[_PENDING], row[_FAILED])}
    if not answers & (_YES | _NO):
        rows = [
            {"gpu_bus_id": row["pci.bus_id"], _PENDING: row[_PAGES], _FAILED: "no"}
            for row in query(system, ["pci.bus_id", _PAGES], wanted.seconds)
        ]
        answers = {row[_PENDING].lower() for row in rows}
    failed = [row["gpu_bus_id"] for row in rows if row[_FAILED].lower() in _YES]
    pending = [row["gpu_bus_id"] for row in rows if row[_PENDING].lower() in _YES]
    if failed:
        return (
            CheckOutcome.BAD,
            f"row remapping failed, the GPU must be replaced: {first_few(failed)}",
        )
    if pending:
        return CheckOutcome.BAD, f"memory repair waits for a GPU reset: {first_few(pending)}"
    if not answers & _NO:
        raise Unanswered("these GPUs do not say")
    return CheckOutcome.FINE, "no repair pending"


# ----------------------------------------------------------------------------- the driver's log
XID_RECENT_SECONDS = 86400.0
# NVIDIA, "Xid errors": the ones whose advice is to reset, to diagnose, or to replace
HARDWARE_XIDS = {
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
}
_XID_LINE = re.compile(r"^\[\s*(\d+\.\d+)\].*NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)$")


def check_xid(system: System, wanted: NodeRequirements) -> Answer:
    """Bad with a hardware Xid within a day; a warning with an older one, for the node may have been
    repaired since.
    """
    try:
        output = system.command(["dmesg", "--kernel"], wanted.seconds)
    except FileNotFoundError:
        raise Unanswered("there is no dmesg on this node") from None
    if output.status != 0:
        raise Unanswered(
            f"the kernel log may not be read: {shortened(' '.join(output.error.split()), 120)}"
        )
    up = float(system.read("/proc/uptime").split()[0])
    recent: list[str] = []
    old: list[str] = []
    programs = 0
    for line in output.text.splitlines():
        match = _XID_LINE.match(line)
        if match is None:
            continue
        number = int(match[3])
        if number not in HARDWARE_XIDS:
            programs += 1
            continue
        told = f"Xid {number} ({HARDWARE_XIDS[number]}) on {match[2]}"
        (recent if up - float(match[1]) <= XID_RECENT_SECONDS else old).append(told)
    if recent:
        return CheckOutcome.BAD, first_few(dict.fromkeys(recent))
    if old:
        return CheckOutcome.WARNING, f"more than a day ago: {first_few(dict.fromkeys(old))}"
    return CheckOutcome.FINE, f"no hardware Xid ({programs} of programs)" if programs else "no Xid"


# ----------------------------------------------------------------------------- NVLink
_GPU = re.compile(r"GPU (\d+):")
_LINK = re.compile(r"Link (\d+):\s*(.+)")
_SPEED = re.compile(r"([\d.]+)\s*GB/s")


def check_nvlink(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when a GPU has fewer links up than another GPU of the node, or a slower one. Compared
    among peers only.
    """
    output = ask(system, ["nvlink", "--status"], wanted.seconds)
    if output.status != 0:
        raise Unanswered(words_of(output))
    links: dict[str, list[float]] = {}
    gpu = ""
    for line in output.text.splitlines():
        head = _GPU.match(line.strip())
        link = _LINK.match(line.strip())
        if head:
            gpu = head[1]
            links[gpu] = []
        elif link and gpu:
            speed = _SPEED.search(link[2])
            if speed:
                links[gpu].append(float(speed[1]))
    most = max((len(found) for found in links.values()), default=0)
    if most == 0:
        return CheckOutcome.FINE, "no NVLink here"
    fewer = [
        f"GPU {name}: {len(found)} of {most}" for name, found in links.items() if len(found) < most
    ]
    if fewer:
        return CheckOutcome.BAD, f"links that are up: {first_few(fewer)}"
    fastest = max(speed for found in links.values() for speed in found)
    slow = [
        f"GPU {name}: {min(found):g} GB/s"
        for name, found in links.items()
        if min(found) < 0.9 * fastest
    ]
    if slow:
        return CheckOutcome.BAD, f"links slower than {fastest:g} GB/s: {first_few(slow)}"
    return CheckOutcome.FINE, f"{most} links up on each of {len(links)} GPUs"


# ----------------------------------------------------------------------------- clocks
# NVML, nvmlClocksEventReasons
_HELD_BY_HARDWARE = {0x8: "hardware slowdown", 0x40: "too hot (hardware)", 0x80: "power brake"}
_HELD_BY_DRIVER = {0x20: "too hot (driver)", 0x2: "clocks set by hand"}
# since driver 535, and before
_REASONS = "clocks_event_reasons.active"
_OLD_REASONS = "clocks_throttle_reasons.active"


def check_throttling(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when the hardware holds a GPU back; a warning when the driver or a person does."""
    bad = []
    doubtful = []
    told = 0
    for index, reasons in _clock_reasons(system, wanted):
        try:
            bits = int(reasons, 16)
        except ValueError:
            continue  # this GPU does not say
        told += 1
        bad += [f"GPU {index}: {words}" for bit, words in _HELD_BY_HARDWARE.items() if bits & bit]
        doubtful += [
            f"GPU {index}: {words}" for bit, words in _HELD_BY_DRIVER.items() if bits & bit
        ]
    if bad:
        return CheckOutcome.BAD, f"clocks are held down: {first_few(bad)}"
    if doubtful:
        return CheckOutcome.WARNING, f"clocks are held down: {first_few(doubtful)}"
    if not told:
        raise Unanswered("these GPUs do not say")
    return CheckOutcome.FINE, "no GPU is held below its clocks"


def _clock_reasons(system: System, wanted: NodeRequirements) -> list[tuple[str, str]]:
    """(index, bit mask in hexadecimal) of each GPU."""
    try:
        return [
            (row["index"], row[_REASONS])
            for row in query(system, ["index", _REASONS], wanted.seconds)
        ]
    except Unanswered as error:
        if INVALID_FIELD not in str(error):
            raise
    return [
        (row["index"], row[_OLD_REASONS])
        for row in query(system, ["index", _OLD_REASONS], wanted.seconds)
    ]


# ----------------------------------------------------------------------------- PCIe
_PCIE_WIDTH = "pcie.link.width.current"
_PCIE_WIDEST = "pcie.link.width.max"


def check_pcie(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when a GPU has fewer lanes than another of the node; a warning when all have fewer than
    they could.
    """
    rows = query(system, ["index", _PCIE_WIDTH, _PCIE_WIDEST], wanted.seconds)
    widths = {
        row["index"]: width for row in rows if (width := number(row[_PCIE_WIDTH])) is not None
    }
    if not widths:
        raise Unanswered("these GPUs do not say")
    widest = max(widths.values())
    narrow = [f"GPU {index}: x{width}" for index, width in widths.items() if width < widest]
    if narrow:
        return (
            CheckOutcome.BAD,
            f"PCIe lanes are missing (others have x{widest}): {first_few(narrow)}",
        )
    most = max((number(row[_PCIE_WIDEST]) or 0 for row in rows), default=0)
    if widest < most:
        return CheckOutcome.WARNING, f"all GPUs have x{widest} of x{most} PCIe lanes"
    return CheckOutcome.FINE, f"x{widest} on all GPUs"

"""Is a GPU held below its clocks? One slow GPU slows every other GPU of the training."""

from __future__ import annotations

from tr11ops.base.errors import Unanswered
from tr11ops.base.nvidia import INVALID_FIELD, query
from tr11ops.base.units import first_few
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

# NVML, nvmlClocksEventReasons
_BAD = {0x8: "hardware slowdown", 0x40: "too hot (hardware)", 0x80: "power brake"}
_DOUBTFUL = {0x20: "too hot (driver)", 0x2: "clocks set by hand"}
# since driver 535, and before
_NEW, _OLD = "clocks_event_reasons.active", "clocks_throttle_reasons.active"


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when the hardware holds a GPU back; a warning when the driver or a person does."""
    bad, doubtful, told = [], [], 0
    for index, reasons in _reasons(system, wanted):
        try:
            bits = int(reasons, 16)
        except ValueError:
            continue  # this GPU does not say
        told += 1
        bad += [f"GPU {index}: {words}" for bit, words in _BAD.items() if bits & bit]
        doubtful += [f"GPU {index}: {words}" for bit, words in _DOUBTFUL.items() if bits & bit]
    if bad:
        return CheckOutcome.BAD, f"clocks are held down: {first_few(bad)}"
    if doubtful:
        return CheckOutcome.WARNING, f"clocks are held down: {first_few(doubtful)}"
    if not told:
        raise Unanswered("these GPUs do not say")
    return CheckOutcome.FINE, "no GPU is held below its clocks"


def _reasons(system: System, wanted: NodeRequirements) -> list[tuple[str, str]]:
    """(index, bit mask in hexadecimal) of each GPU."""
    try:
        return [(row["index"], row[_NEW]) for row in query(system, ["index", _NEW], wanted.seconds)]
    except Unanswered as error:
        if INVALID_FIELD not in str(error):
            raise
    return [(row["index"], row[_OLD]) for row in query(system, ["index", _OLD], wanted.seconds)]

"""The order of sightings: by time where both have one, else by line. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tr11ops.diagnose.sighting import Sighting
from tr11ops.diagnose.signature import FaultClass, NodeBlame

SURELY_BROKEN = 0.88
SURELY_OWN = 0.85
OF_OTHERS = frozenset(
    {FaultClass.NCCL_NETWORK, FaultClass.NCCL_TIMEOUT, FaultClass.RENDEZVOUS, FaultClass.UNKNOWN}
)
STRONG = 0.75  # a cause with this confidence says more than a bare exception
OF_PEERS = frozenset({FaultClass.NCCL_NETWORK, FaultClass.NCCL_TIMEOUT, FaultClass.RENDEZVOUS})
_KERNELS_WORD = re.compile(r"\bkernel: |NVRM: |nvidia-nvswitch")


def is_of_peers(one: Sighting) -> bool:
    """Whether a line tells of another one that did not answer, and not of a fault of who prints it."""
    return (
        one.signature.fault in OF_PEERS
        and one.signature.blame is not NodeBlame.NODE
        and not one.signature.own
    )


def is_kernels(one: Sighting) -> bool:
    return _KERNELS_WORD.search(one.text) is not None


def lines_below(one: Sighting, other: Sighting) -> int:
    """How many lines a line of the same file stands below another; 0 in another file."""
    if one.file == other.file:
        return one.line_number - other.line_number
    return 0


def is_surely_its_own(one: Sighting) -> bool:
    """Whether what ended a process has nothing to do with others: they lose it, and say so at once."""
    return one.signature.confidence >= SURELY_OWN and one.signature.fault not in OF_OTHERS


def is_own_link(one: Sighting) -> bool:
    """Whether a node tells of its own broken link to the others, and no one of another's."""
    is_nodes = (
        one.signature.fault is FaultClass.NCCL_NETWORK and one.signature.blame is NodeBlame.NODE
    )
    return is_nodes and not one.is_mild


def is_lost_gpu(one: Sighting) -> bool:
    is_surely = one.signature.confidence >= SURELY_BROKEN and not one.is_mild
    return (
        one.signature.fault is FaultClass.GPU_HARDWARE
        and one.signature.blame is NodeBlame.NODE
        and is_surely
    )


def earlier(one: Sighting | None, other: Sighting | None) -> Sighting | None:
    if one is None or other is None:
        return one or other
    if is_before(other, one):
        return other
    return one


def first_of(sightings: Sequence[Sighting]) -> Sighting | None:
    """The first one by the log, or by the times where they are of several files."""
    if not sightings:
        return None
    first = sightings[0]
    for one in sightings[1:]:
        if is_before(one, first) or (one.file == first.file and _is_earlier(one, first)):
            first = one
    return first


def _is_earlier(one: Sighting, other: Sighting) -> bool:
    """Whether a later line of a log tells of an earlier time; its writers need not take turns."""
    times = one.origin.time, other.origin.time
    return (
        None not in times
        and one.origin.writer != other.origin.writer
        and str(times[0])[:14] < str(times[1])[:14]
    )


def is_before(one: Sighting, other: Sighting) -> bool:
    if one.file == other.file:
        return one.line_number < other.line_number
    if one.time is None or other.time is None:
        return False
    return one.time < other.time

"""Are all NVLinks up? A link that is down makes every collective of the node slow, or fail."""

from __future__ import annotations

import re

from tr11ops.base.errors import Unanswered
from tr11ops.base.nvidia import ask, words_of
from tr11ops.base.units import first_few
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

_GPU = re.compile(r"GPU (\d+):")
_LINK = re.compile(r"Link (\d+):\s*(.+)")
_SPEED = re.compile(r"([\d.]+)\s*GB/s")


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when a GPU has fewer links up than another GPU of the node, or a slower one. Compared
    among peers only.
    """
    output = ask(system, ["nvlink", "--status"], wanted.seconds)
    if output.status != 0:
        raise Unanswered(words_of(output))
    links: dict[str, list[float]] = {}
    gpu = ""
    for line in output.text.splitlines():
        head, link = _GPU.match(line.strip()), _LINK.match(line.strip())
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

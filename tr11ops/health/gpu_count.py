"""Are all GPUs there? A GPU that fell off the bus is missing from the list, or makes nvidia-smi itself fail."""

from __future__ import annotations

import re

from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System, Unanswered
from tr11ops.health.nvidia import ask, words_of

_LOST = re.compile(
    r"GPU is lost|fallen off the bus|unable to determine the device handle|couldn't communicate with the NVIDIA driver"
    r"|requires reset|unknown error",
    re.IGNORECASE,
)


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when fewer GPUs answer than the run asks for."""
    output = ask(system, ["--query-gpu=index,uuid", "--format=csv,noheader"], wanted.seconds)
    found = sum(1 for line in output.text.splitlines() if re.match(r"\d+,\s*(GPU|MIG)-", line.strip()))
    if output.status != 0 or _LOST.search(output.text):
        words = words_of(output)
        if _LOST.search(words):
            return CheckOutcome.BAD, words
        if "no devices were found" not in words.lower():
            raise Unanswered(words)
    if found < wanted.gpus:
        return CheckOutcome.BAD, f"{found} of {wanted.gpus} GPUs answer"
    return CheckOutcome.FINE, f"{found} GPUs"

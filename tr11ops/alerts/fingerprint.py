"""Which findings are the same incident.

A fingerprint is the detector and the subject without what changes at every restart of the same fault: job ids
(`1007`, `1000_7`, `1000_[3-9%1]`) and ranks. A fault that goes on in the next array task is thus the same incident.
Everything else is identity: node names, file systems, names of periodic jobs. Where the number itself says what is
broken, as the step of a checkpoint does, or the iteration at which counters jumped, it stays.
"""

from __future__ import annotations

import hashlib
import re

LENGTH = 12  # hexadecimal digits: two of ten thousand incidents share one with a chance of 2e-7

# Detectors whose subject is a number that is the fault's identity.
_NUMBERED = frozenset({"checkpoint-unsound", "counters-jump"})
_JOB_ID = re.compile(r"\d+(?:_(?:\d+|\[[^\]]*\]))?(?:[.+]\w+)?")
_RANK = re.compile(r"\branks?[ -]?\d[\d,-]*", re.IGNORECASE)


def normalised(detector: str, subject: str) -> str:
    """The part of a subject that is the same for the same fault."""
    text = " ".join(subject.split())
    if detector in _NUMBERED:
        return text
    words = re.split(r"[\s,;]+", _RANK.sub(" ", text))
    return " ".join(word for word in words if word and word != "job" and not _JOB_ID.fullmatch(word))


def fingerprint(detector: str, subject: str) -> str:
    """Twelve hexadecimal digits that name the incident within its run."""
    identity = f"{detector}\0{normalised(detector, subject)}"
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:LENGTH]
